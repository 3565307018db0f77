"""Any model on any cluster with any batch: a plan whose numbers add up, or one line that says why there is none."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from cost.random_jobs import random_model
from meshwright.cost.closed_form import model_spec
from meshwright.cost.engine import own_engine, process_engine
from meshwright.cost.quantities import Job
from meshwright.cost.states import STATES
from meshwright.errors import MeshwrightError
from meshwright.plan.plan import Request, make_plan, require_chosen
from meshwright.plan.space import Knobs
from meshwright.report.plan_json import plan_document
from meshwright.report.plan_text import plan_lines
from meshwright.spec.catalogue import catalogue, find_model
from meshwright.spec.find_cluster import find_cluster
from meshwright.spec.hardware import devices
from meshwright.spec.model_spec import ModelSpec


def any_model(draw: random.Random) -> ModelSpec:
    """One of the catalogue, a bare number, or one that nobody would build."""
    kind = draw.random()
    if kind < 0.2:
        return random_model(draw)
    name = draw.choice(sorted(catalogue())) if kind < 0.8 else f"{draw.randint(20, 900_000)}M"
    return model_spec(
        find_model(name),
        seq_len=draw.choice([1, 100, 512, 2048, 4096, 8192, 131072]),
        compute=draw.choice(["bf16", "fp32", "fp16", "fp64"]),
    )


def any_request(draw: random.Random) -> Request:
    model, kind = any_model(draw), draw.choice(sorted(set(devices()) - {"H100", "A100", "V100"}))
    nodes, each = draw.choice([1, 1, 2, 3, 7, 16]), draw.choice([1, 2, 3, 4, 8])
    try:
        cluster = find_cluster(f"{nodes}x{each}x{kind}")
    except MeshwrightError:  # fewer devices a node than that, or a kind that leaves the board open
        cluster = find_cluster("2x8xH100-SXM")
    make = draw.choice([own_engine, process_engine])
    job = Job(
        model=model,
        global_batch_size=draw.choice([1, 2, 7, 12, 64, 96, 100, 512, 1024]),
        states=STATES[draw.choice(sorted(STATES))],
        engine=make({"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[model.compute], exact=draw.random() < 0.2),
        capacity_bytes=cluster.device.memory_bytes,
    )
    knobs = Knobs(
        microbatch_size=draw.choice([None, None, 1, 3]),
        recompute=draw.choice([None, None, "none", "full"]),
        sync=draw.choice([None, None, "last", "every"]),
    )
    layouts = draw.choice([(), (), (), ("zero3x2", "ddp4"), ("tp2+pp2", "hsdp2x2z1")])
    return Request(job=job, cluster=cluster, knobs=knobs, layouts=layouts, runs_first=draw.random() < 0.3)


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers_in(each)]
    if isinstance(value, list | tuple):
        return [number for each in value for number in numbers_in(each)]
    return [float(value)] if isinstance(value, int | float) else []


def check(request: Request) -> None:
    made = make_plan(request)
    document = json.loads(json.dumps(plan_document(made), allow_nan=False))
    assert all(math.isfinite(number) and number >= 0 for number in numbers_in(document)), "no negative amount"
    for option in made.candidates:
        terms = option.memory.terms
        assert option.memory.total_bytes == math.ceil(sum(term.amount for term in terms))
        assert option.memory.reserved_bytes >= option.memory.total_bytes - 1
    assert made.counts.considered >= made.counts.legal >= made.counts.fitting >= 0
    assert all(isinstance(line, str) for line in plan_lines(made))
    try:
        assert require_chosen(made) is made.chosen
    except MeshwrightError as error:
        assert made.chosen is None and error.exit_code == 3 and "\n" not in str(error)


EACH = 20


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(2, 500))])
def test_any_plan_adds_up_or_says_in_a_line_why_there_is_none(seed) -> None:
    """20 each: 10,000 in `make matrix`."""
    draw = random.Random(seed)
    for _ in range(EACH):
        check(any_request(draw))
