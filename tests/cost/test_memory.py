"""What holds of every estimate, whatever is trained and however it is cut."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest

from cost.random_jobs import random_candidate, random_job
from meshwright.cost.candidate import Candidate, Columns
from meshwright.cost.engine import own_engine
from meshwright.cost.explain import FITS, explain
from meshwright.cost.memory import estimate
from meshwright.cost.quantities import Job
from meshwright.cost.states import STATES
from meshwright.cost.terms import TERMS
from meshwright.spec.model_spec import Bytes, ModelSpec, UnitSpec

TIMES = 100


def columns_of(candidates: list[Candidate]) -> Columns:
    return Columns(**{f.name: np.array([getattr(c, f.name) for c in candidates]) for f in fields(Columns)})


@pytest.mark.parametrize("seed", range(10))
def test_terms_are_finite_and_add_up(seed):
    draw = random.Random(seed)
    for _ in range(TIMES // 10):
        job, candidate = random_job(draw), random_candidate(draw)
        found, terms = estimate(job, candidate), explain(job, candidate)
        assert [term.name for term in terms.terms] == [*TERMS, "allocator", "context"]
        assert all(math.isfinite(term.amount) and term.amount >= 0 for term in terms.terms)
        total = sum(term.amount for term in terms.terms)
        assert terms.total_bytes == math.ceil(total)
        assert total == pytest.approx(float(found.total_bytes[0]), rel=1e-12), "fp64 sums in two orders"
        assert terms.reserved_bytes >= terms.total_bytes - 1
        assert terms.fits == FITS[int(found.fits[0])]


def evaluated(formula: str) -> float:
    arithmetic = formula.replace(",", "").replace(" layers", "").replace(" tokens", "").replace(" x ", " * ")
    return float(eval(arithmetic, {"__builtins__": {}}))


@pytest.mark.parametrize("seed", range(10))
def test_every_formula_gives_its_amount(seed):
    draw = random.Random(100 + seed)
    for _ in range(TIMES // 10):
        for term in explain(random_job(draw), random_candidate(draw)).terms:
            # Numbers of a formula are printed to 6 digits or 2 places.
            assert evaluated(term.formula) == pytest.approx(term.amount, rel=1e-4, abs=1.0), (term.name, term.formula)


@pytest.mark.parametrize("schedule", range(5))
@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("pp", [1, 4])
def test_every_formula_gives_its_amount_in_exact_mode_with_a_tied_table(pp, zero_stage, schedule):
    draw = random.Random(zero_stage)
    job = random_job(draw)
    while not (job.model.tied and job.model.embedding_parameters and job.model.units):
        job = random_job(draw)
    job = replace(job, engine=own_engine(4, exact=True), states=STATES["fsdp2"])
    one = Candidate(pp=pp, dp_shard=2, zero_stage=zero_stage, num_microbatches=8, schedule=schedule)
    one = replace(one, chunks=2 if pp > 1 and schedule > 1 else 1)
    for term in explain(job, one).terms:
        assert evaluated(term.formula) == pytest.approx(term.amount, rel=1e-4, abs=1.0), (term.name, term.formula)


@pytest.mark.parametrize("seed", range(5))
def test_columns_price_as_each_candidate_alone(seed):
    draw = random.Random(200 + seed)
    job, candidates = random_job(draw), [random_candidate(draw) for _ in range(60)]
    together = estimate(job, columns_of(candidates))
    for row, candidate in enumerate(candidates):
        alone = estimate(job, candidate)
        for name in ("allocated_bytes", "total_bytes", "reserved_bytes"):
            assert getattr(together, name)[row] == pytest.approx(float(getattr(alone, name)[0]), rel=1e-12)


GROWTH = {
    "ddp": ("dp_replicate", {}),
    "zero1": ("dp_shard", {"zero_stage": 1}),
    "zero2": ("dp_shard", {"zero_stage": 2}),
    "zero3": ("dp_shard", {"zero_stage": 3}),
    "hsdp": ("dp_shard", {"zero_stage": 3, "dp_replicate": 2}),
    "tp": ("tp", {}),
    "cp": ("cp", {"dp_shard": 2, "zero_stage": 3}),
}


@pytest.mark.parametrize("strategy", GROWTH)
def test_more_devices_under_one_strategy_never_need_more_memory_each(strategy):
    axis, fixed = GROWTH[strategy]
    draw = random.Random(strategy)
    for _ in range(30):
        job = random_job(draw)
        base = replace(random_candidate(draw), dp_replicate=1, dp_shard=1, zero_stage=0, tp=1, cp=1, ep=1, pp=1)
        sizes = [
            float(estimate(job, replace(base, **(fixed | {axis: n}))).total_bytes[0]) for n in (2, 4, 8, 16, 32, 64)
        ]
        assert all(more <= fewer * (1 + 1e-12) for fewer, more in pairwise(sizes)), sizes


def decoder_job(draw: random.Random) -> Job:
    """A model of usual proportions: what a block keeps outweighs what passes between stages."""
    h, f = 1024 * draw.randint(1, 16), 4
    unit = UnitSpec(
        name="layer",
        count=64,
        parameters=16 * h * h,
        saved={"none": Bytes(residual=8.0 * h, inner=(8.0 + 8 * f) * h), "full": Bytes(residual=2.0 * h)},
        backward_peak=Bytes(residual=2.0 * h, inner=4.0 * f * h),
    )
    table = 128_000 * h
    model = ModelSpec(
        name="decoder",
        units=(unit,),
        embedding_parameters=table,
        head_parameters=table,
        loss_peak=Bytes(inner=12.0 * 128_000),
        d_model=h,
        vocab_size=128_000,
        seq_len=draw.choice([512, 8192]),
        compute="bf16",
    )
    job = random_job(draw)
    # More stages have more microbatches in flight, and hold the outputs of each: that alone may grow. So may the
    # layers of a stage, where they are dealt out by cost and the head counts.
    return replace(
        job, model=model, engine=replace(job.engine, keeps_outputs=False, harvests=False, cuts_by_cost=False)
    )


@pytest.mark.parametrize("stages", [2, 4, 8, 16, 32])
def test_more_pipeline_stages_never_need_more_memory_each_where_they_divide_the_layers(stages):
    draw = random.Random(stages)
    for _ in range(15):
        job = decoder_job(draw)
        base = replace(random_candidate(draw), schedule=1, chunks=1, num_microbatches=128, cp=1, ep=1, recompute=0)
        fewer, more = (float(estimate(job, replace(base, pp=pp)).total_bytes[0]) for pp in (stages, 2 * stages))
        assert more <= fewer * (1 + 1e-12)
