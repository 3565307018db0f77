"""The JSON document of a plan: its keys, its sums, and that it is JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from meshwright.cost.terms import TERMS
from meshwright.plan.plan import Request, make_plan
from meshwright.report.plan_json import plan_document
from plan.some_models import LLAMA_405B, cluster_of, dense, job_of


def document(model=None, *, nodes: int = 1, states: str = "fsdp2", **changes: Any) -> dict[str, Any]:
    job = job_of(model or dense(), states=states)
    request = Request(job=job, cluster=cluster_of(nodes), **changes)
    found: dict[str, Any] = json.loads(json.dumps(plan_document(make_plan(request)), allow_nan=False))
    return found


def candidates_in(found: dict[str, Any]) -> list[dict[str, Any]]:
    inner = [rung["candidate"] for rung in found["ladder"]] + [one["candidate"] for one in found["rejections"]]
    return [one for one in [found["chosen"], *found["candidates"], *inner] if one is not None]


def test_the_document_has_the_keys_that_scripts_read() -> None:
    found = document()
    assert {"workload", "cluster", "chosen", "ladder", "candidates", "rejections", "counts"} <= set(found)
    assert found["workload"]["model"]["num_parameters"] == dense().num_parameters
    assert set(found["counts"]) == {"considered", "legal", "fitting", "rejected"}
    for rung in found["ladder"]:
        assert {"rung", "candidate", "fits", "shortfall_bytes", "because"} <= set(rung)
    for one in found["rejections"]:
        assert {"layout", "rule", "because", "nearest", "candidate"} <= set(one)
    keys = {"layout", "runs", "microbatch_size", "grad_accum_steps", "recompute", "pp_schedule", "memory", "time"}
    memory = {"moment", "terms", "total_bytes", "reserved_bytes", "capacity_bytes", "fits"}
    for one in candidates_in(found):
        assert keys <= set(one) and memory <= set(one["memory"]) and one["time"] is None
        assert one["memory"]["fits"] in ("yes", "tight", "no")


def test_terms_are_named_once_and_add_up() -> None:
    for one in candidates_in(document()):
        terms = one["memory"]["terms"]
        assert [term["name"] for term in terms] == [*TERMS, "allocator", "context"]
        assert all(term["bytes"] >= 0 and term["formula"] and term["source"] for term in terms)
        assert one["memory"]["total_bytes"] == math.ceil(sum(term["bytes"] for term in terms))
        assert one["traffic"]["total_bytes"] == pytest.approx(sum(term["bytes"] for term in one["traffic"]["terms"]))


def test_the_textbook_table_of_7_billion_parameters() -> None:
    """14 + 14 + 56 GB with DDP; 14 + 14 + 56/N ZeRO-1; 14 + 70/N ZeRO-2; 84/N ZeRO-3, on N = 8 devices."""
    model = dense(vocab_size=32000, n_kv_heads=32, d_ff=11008)
    exact = type(model)(**{name: getattr(model, name) for name in model.__slots__} | {"other_parameters": 0})
    spare = 7_000_000_000 - exact.num_parameters
    assert spare > 0
    model = type(model)(**{name: getattr(model, name) for name in model.__slots__} | {"other_parameters": spare})
    found = document(model, states="textbook", layouts=("ddp8", "zero1x8", "zero2x8", "zero3x8"))
    sizes = {one["layout"]: [term["bytes"] / 1e9 for term in one["memory"]["terms"][:3]] for one in found["candidates"]}
    assert sizes == {
        "ddp8": [14, 14, 56],
        "zero1x8": [14, 14, 7],
        "zero2x8": [14, 1.75, 7],
        "zero3x8": [1.75, 1.75, 7],
    }


def test_what_is_planned_says_that_it_does_not_run() -> None:
    found = document(nodes=2, layouts=("zero2x16", "zero2x8+tp2", "zero3x8+cp2"))
    assert {one["layout"]: one["runs"] for one in found["candidates"]} == {
        "zero2x16": True,
        "zero2x8+tp2": True,
        "zero3x8+cp2": False,
    }


def test_nothing_that_fits_is_a_document_too() -> None:
    found = document(dense(**LLAMA_405B), nodes=2)
    assert found["chosen"] is None and found["candidates"] == [] and found["counts"]["fitting"] == 0
    assert found["advice"]["fewest_devices"]["num_devices"] > 16
    assert len(found["rejections"]) == 50


def test_top_is_the_number_of_candidates() -> None:
    assert [len(document(top=top)["candidates"]) for top in (1, 7)] == [1, 7]
