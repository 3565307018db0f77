"""Clusters and estimates: sums that cannot be wrong; and what of a recipe is held fixed."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sound_recipes import SOUND

from meshwright.errors import SpecError
from meshwright.spec.cluster import Cluster, Device, Link
from meshwright.spec.estimate import MemoryEstimate, StepTime, Term, Verdict
from meshwright.spec.load import loads

BAD = [-1.0, math.nan, math.inf, -math.inf]


def term(name: str, amount: float, unit: str = "bytes") -> Term:
    return Term(name, amount, unit, f"{amount}", "by hand")


def test_a_cluster_counts_its_devices() -> None:
    device = Device(memory_bytes=80 * 10**9, peak_flops={"bf16": 989e12})
    cluster = Cluster(4, 8, device, intra=Link(450e9, 2e-6), inter=Link(50e9, 5e-6))
    assert cluster.num_devices == 32
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    with pytest.raises(SpecError, match=r"cluster\.nodes: is 0"):
        Cluster(0, 8, device, cluster.intra, cluster.inter)


@pytest.mark.parametrize("amount", BAD)
def test_no_amount_is_negative_or_not_finite(amount: float) -> None:
    for make in (
        lambda: Link(amount, 0.0),
        lambda: Link(1.0, amount),
        lambda: Device(1, {"fp32": amount}),
        lambda: term("x", amount),
    ):
        with pytest.raises(SpecError):
            make()


def test_a_bandwidth_of_nothing() -> None:
    with pytest.raises(SpecError, match="above 0"):
        Link(0.0, 0.0)


@given(st.lists(st.integers(0, 10**12), max_size=6))
def test_totals_are_sums(amounts: list[int]) -> None:
    terms = tuple(term(f"t{index}", amount) for index, amount in enumerate(amounts))
    assert MemoryEstimate(terms).total_bytes == sum(amounts)
    seconds = tuple(term(f"t{index}", amount, "s") for index, amount in enumerate(amounts))
    assert StepTime(seconds).total_s == math.fsum(amounts)


def test_terms_that_do_not_add_up() -> None:
    with pytest.raises(SpecError, match="is in s; this sum is in bytes"):
        MemoryEstimate((term("x", 1, "s"),))
    with pytest.raises(SpecError, match="stands 2 times"):
        StepTime((term("x", 1, "s"), term("x", 1, "s")))


def test_a_verdict_is_a_value() -> None:
    verdict = Verdict("weights", "fail", expected="ab", measured="cd", because="digests differ", fix="see rank 1")
    assert verdict == pickle.loads(pickle.dumps(verdict))
    assert verdict.tolerance is None


def test_a_resume_may_change_knobs_and_nothing_else() -> None:
    recipe = loads(SOUND)
    knobs = [
        "layout=zero3x2",
        "checkpoint.every_steps=2",
        "train.stop_after=5",
        "train.recompute=full",
        "train.sync=every",
    ]
    assert loads(SOUND, knobs).workload.differences(recipe.workload) == []
    changed = loads(SOUND, ["optimizer.lr=2.0", "train.seed=4", "optimizer.eps=1e-6"])
    assert recipe.workload.differences(changed.workload) == [
        ("optimizer.lr", 1e-3, 2.0),
        ("optimizer.options", {}, {"eps": 1e-6}),
        ("train.seed", 0, 4),
    ]
