"""Bytes sent in a step: textbook volumes by hand, and formulas that give the amounts that stand beside them."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost.candidate import Candidate, Columns
from meshwright.cost.traffic import AXES, explain_traffic, traffic
from plan.some_models import dense, job_of

MODEL = dense(n_layers=4, d_model=512, n_heads=8, n_kv_heads=4, d_ff=1024, vocab_size=1000, seq_len=1024)
N = MODEL.num_parameters
EXPERTS = dense(n_layers=4, d_model=512, n_heads=8, n_kv_heads=4, d_ff=1024, vocab_size=1000, n_experts=8)


def sent(one: Candidate, model=MODEL, states: str = "fsdp2") -> dict[str, float]:
    """Bytes by axis of one candidate."""
    found = traffic(job_of(model, states=states), one)
    assert found.total_bytes[0] == pytest.approx(sum(float(part[0]) for part in found.by_axis), rel=1e-15)
    return {name: float(part[0]) for name, part in zip(AXES, found.by_axis, strict=True)}


def test_one_device_sends_nothing() -> None:
    assert set(sent(Candidate(num_microbatches=4)).values()) == {0.0}


def test_ddp_reduces_its_gradients_once_a_step_or_at_every_microbatch() -> None:
    assert sent(Candidate(dp_replicate=8, num_microbatches=4))["data"] == 2 * 4 * N * 7 / 8
    assert sent(Candidate(dp_replicate=8, num_microbatches=4, sync_every=1))["data"] == 4 * 2 * 4 * N * 7 / 8


def test_zero_1_sends_what_ddp_sends_if_both_count_four_bytes() -> None:
    """A reduce-scatter and an all-gather are an all-reduce. Here weights go in two bytes, gradients in four."""
    one = Candidate(dp_shard=8, zero_stage=1, num_microbatches=4)
    assert sent(one)["data"] == (2 + 4) * N * 7 / 8
    paper = sent(one, states="textbook")["data"]
    assert paper == sent(Candidate(dp_replicate=8, num_microbatches=4), states="textbook")["data"]


def test_zero_2_reduces_at_every_microbatch_and_gathers_once() -> None:
    one = Candidate(dp_shard=8, zero_stage=2, num_microbatches=4, sync_every=1)
    assert sent(one)["data"] == (2 + 4 * 4) * N * 7 / 8


def test_zero_3_sends_one_and_a_half_times_ddp_but_for_what_is_in_no_block() -> None:
    one = Candidate(dp_shard=8, zero_stage=3, num_microbatches=1, sync_every=1)
    root = MODEL.root_parameters
    paper = sent(one, states="textbook")["data"]
    assert paper == (2 * (2 * (N - root) + root) + 2 * N) * 7 / 8
    ddp = sent(Candidate(dp_replicate=8), states="textbook")["data"]
    assert paper == pytest.approx(1.5 * ddp - 2 * root * 7 / 8, rel=1e-12)


def test_hsdp_sends_whole_weights_inside_and_shards_across() -> None:
    one = Candidate(dp_replicate=2, dp_shard=4, zero_stage=3, num_microbatches=1, sync_every=1)
    root = MODEL.root_parameters
    found = sent(one)
    assert found["data"] == (2 * (2 * (N - root) + root) + 4 * N) * 3 / 4
    assert found["replicas"] == 2 * 4 * N / 4 * 1 / 2


def test_tp_has_eight_collectives_a_layer_and_three_more_with_recompute() -> None:
    """The last one of forward gives nothing that backward needs, unless it goes through a dropout."""
    stream = 2 * 2 * 1024 * 512  # bytes x samples x tokens x d_model
    one = Candidate(tp=4, microbatch_size=2, num_microbatches=3)
    assert sent(one)["tensor"] == (8 * 4 + 4) * stream * 3 / 4 * 3
    again = [replace(one, recompute=mode) for mode in (1, 2)]
    assert [sent(one)["tensor"] for one in again] == [(11 * 4 + 4) * stream * 3 / 4 * 3] * 2
    dropped = replace(MODEL, architecture=dict(MODEL.architecture) | {"dropout": 0.1})
    assert sent(again[0], dropped)["tensor"] == (12 * 4 + 4) * stream * 3 / 4 * 3


@pytest.mark.parametrize(
    ("pp", "chunks", "schedule", "sends"), [(2, 1, 1, 1), (4, 1, 1, 2), (2, 2, 2, 3), (4, 2, 2, 4), (2, 2, 4, 2)]
)
def test_the_busiest_stage_sends_activations_on_and_gradients_back(pp, chunks, schedule, sends) -> None:
    one = Candidate(pp=pp, chunks=chunks, schedule=schedule, num_microbatches=6)
    assert sent(one)["pipeline"] == sends * 2 * 1024 * 512 * 6


def test_cp_passes_keys_and_values_round_and_twice_as_many_bytes_back() -> None:
    one = Candidate(cp=4, num_microbatches=2)
    keys_and_values = 2 * 256 * (2 * 4 * 64)  # bytes x tokens of a rank x width
    assert sent(one)["context"] == 4 * 3 * 3 * keys_and_values * 2
    assert sent(one)["data"] == 2 * 4 * N * 3 / 4  # the ranks of a sample hold equal weights


def test_ep_sends_tokens_to_their_experts_and_back() -> None:
    one = Candidate(dp_shard=4, zero_stage=3, ep=4, num_microbatches=2, sync_every=1)
    stream = 2 * 4096 * 512
    assert sent(one, EXPERTS)["expert"] == 4 * 4 * 2 * stream * 3 / 4 * 2
    assert sent(one, EXPERTS)["data"] < sent(replace(one, ep=1), EXPERTS)["data"]


def test_offload_moves_gradients_down_and_weights_up() -> None:
    assert sent(Candidate(offload=1))["host"] == (4 + 4) * N
    assert sent(Candidate(dp_shard=4, zero_stage=1, offload=1))["host"] == (4 + 4) * N / 4


CANDIDATES = [
    Candidate(dp_replicate=8, num_microbatches=4),
    Candidate(dp_shard=8, zero_stage=2, num_microbatches=4, sync_every=1),
    Candidate(dp_replicate=2, dp_shard=4, zero_stage=3, num_microbatches=4),
    Candidate(dp_shard=4, zero_stage=3, tp=2, pp=4, num_microbatches=8, recompute=2),
    Candidate(dp_shard=4, zero_stage=1, pp=2, chunks=2, schedule=4, num_microbatches=8, microbatch_size=2),
    Candidate(dp_shard=4, zero_stage=3, cp=2, tp=2, num_microbatches=2, sync_every=1),
    Candidate(dp_shard=8, zero_stage=3, ep=8, num_microbatches=2, offload=1),
]


@pytest.mark.parametrize("one", CANDIDATES, ids=lambda one: one.word)
@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["dense", "experts"])
def test_a_formula_gives_the_amount_beside_it(one: Candidate, model) -> None:
    for term in explain_traffic(job_of(model), one):
        text = re.sub(r"(?<=\d),(?=\d{3})", "", term.formula)
        text = re.sub(r"\bx\b", "*", text)
        text = re.sub(r"[a-z][a-z\-]*:?", "", text)
        assert set(text) <= set("0123456789.+*/() "), term.formula
        # Formulas print two decimals of counts above a thousand.
        assert eval(text) == pytest.approx(term.amount, rel=1e-4), term.formula
        assert term.source and term.unit == "bytes"


def test_columns_are_priced_as_their_candidates() -> None:
    values = {name: np.array([getattr(one, name) for one in CANDIDATES]) for name in Columns.__slots__}
    found = traffic(job_of(EXPERTS), Columns(**values)).total_bytes
    assert found.tolist() == [float(traffic(job_of(EXPERTS), one).total_bytes[0]) for one in CANDIDATES]
    assert np.all(np.isfinite(found)) and np.all(found >= 0)
