"""Collectives of a step, counted by hand for small layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost.candidate import SCHEDULES, Candidate
from meshwright.cost.counts import counts, num_buckets
from meshwright.cost.engine import own_engine
from meshwright.cost.quantities import Job
from meshwright.cost.states import STATES
from meshwright.spec.model_spec import Bytes, ModelSpec, UnitSpec


def job_of(*, tied: bool = False, n_kv_heads: int = 4, dropout: float = 0.0) -> Job:
    """4 layers of 1000 parameters, an embedding and a head of 500 each."""
    unit = UnitSpec(name="layer", count=4, parameters=1000, saved={"none": Bytes(inner=1.0)})
    model = ModelSpec(
        name="small", units=(unit,), embedding_parameters=500, head_parameters=0 if tied else 500, tied=tied,
        other_parameters=10, d_model=10, vocab_size=50, n_heads=8, n_kv_heads=n_kv_heads, seq_len=8, compute="fp32",
        architecture={"dropout": dropout},
    )  # fmt: skip
    return Job(model=model, global_batch_size=8, states=STATES["fsdp2"], engine=own_engine(4), capacity_bytes=1 << 30)


def pipeline(name: str, chunks: int = 1, **more: int) -> Candidate:
    return Candidate(pp=2, schedule=SCHEDULES.index(name), chunks=chunks, num_microbatches=4, **more)


@pytest.mark.parametrize(
    ("one", "wanted"),
    [
        (Candidate(num_microbatches=8), {}),
        (Candidate(dp_replicate=2, num_microbatches=4), {"all_reduce": 1}),
        (Candidate(dp_shard=2, zero_stage=1, num_microbatches=4), {"all_gather": 5, "reduce_scatter": 5}),
        (
            Candidate(dp_shard=2, zero_stage=2, num_microbatches=4, sync_every=1),
            {"all_gather": 5, "reduce_scatter": 20},
        ),
        (
            Candidate(dp_shard=2, zero_stage=3, num_microbatches=4, sync_every=1),
            {"all_gather": 4 * 2 * 4 + 4, "reduce_scatter": 20},
        ),
    ],
    ids=lambda value: value.word if isinstance(value, Candidate) else "",
)
def test_units_are_gathered_and_reduced(one: Candidate, wanted: dict[str, int]) -> None:
    assert counts(job_of(), one) == ({"data": wanted} if wanted else {})


def test_replicas_of_shards_are_summed_unit_by_unit() -> None:
    one = Candidate(dp_replicate=2, dp_shard=2, zero_stage=3, num_microbatches=2)
    assert counts(job_of(), one)["replicas"] == {"all_reduce": 5}


def test_every_layer_talks_twice_each_way_under_tp() -> None:
    found = counts(job_of(), Candidate(tp=2, num_microbatches=8))["tensor"]
    assert found == {"all_gather": 8 * (4 * 4 + 2), "reduce_scatter": 8 * (4 * 4 + 2), "all_reduce": 2 * 8 + 1}


@pytest.mark.parametrize(("dropout", "scatters"), [(0.0, 5), (0.1, 6)])
def test_recompute_talks_again_and_ends_with_what_backward_needs(dropout: float, scatters: int) -> None:
    found = counts(job_of(dropout=dropout), Candidate(tp=2, num_microbatches=8, recompute=2))["tensor"]
    assert found["all_gather"] == 8 * (4 * 6 + 2)
    assert found["reduce_scatter"] == 8 * (4 * scatters + 2)


def test_shared_heads_are_summed_over_the_ranks_that_share_them() -> None:
    one = Candidate(tp=4, num_microbatches=1)
    sums = {kv: counts(job_of(n_kv_heads=kv), one)["tensor"]["all_reduce"] for kv in (1, 2, 4, 8)}
    assert sums == {1: 3, 2: 4, 4: 3, 8: 3}  # 2 of the loss, 1 of norms; one head is shared by all, as norms are


@pytest.mark.parametrize(
    ("one", "each_rank"),
    [(pipeline("gpipe"), (4, 4)), (pipeline("1f1b"), (4, 4)), (pipeline("interleaved1f1b", 2), (12, 12)),
     (pipeline("zbv", 2), (8, 8))],
    ids=lambda value: SCHEDULES[value.schedule] if isinstance(value, Candidate) else "",
)  # fmt: skip
def test_a_microbatch_crosses_every_boundary_between_ranks_once_each_way(one: Candidate, each_rank) -> None:
    found = [counts(job_of(), one, rank)["pipeline"] for rank in range(2)]
    assert found == [{"send": many, "receive": many} for many in each_rank]


@pytest.mark.parametrize(("zero_stage", "gathers"), [(1, 1), (2, 1), (3, 5)])
def test_a_stage_is_gathered_once_or_once_more_than_there_are_microbatches(zero_stage: int, gathers: int) -> None:
    one = pipeline("1f1b", dp_shard=2, zero_stage=zero_stage)
    layers = [2, 2]
    for rank in range(2):
        assert counts(job_of(), one, rank)["data"] == {"all_gather": layers[rank] * gathers + 1, "reduce_scatter": 1}
    assert counts(job_of(), replace(one, dp_replicate=2))["replicas"] == {"all_reduce": 1}


def test_a_table_that_is_tied_over_two_ranks_is_summed_once() -> None:
    assert all(counts(job_of(tied=True), pipeline("1f1b"), rank)["ends"] == {"all_reduce": 1} for rank in range(2))
    assert "ends" not in counts(job_of(tied=True), pipeline("zbv", 2))
    assert "ends" not in counts(job_of(), pipeline("1f1b"))


def test_buckets_are_25_mib() -> None:
    assert [num_buckets(size) for size in (1, 25 << 20, 49 << 20, 75 << 20)] == [1, 1, 1, 3]
