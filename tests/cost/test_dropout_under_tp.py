"""Dropout under tp: attention is made of single operators, on GPUs too, and a rank draws the mask of all heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost.candidate import Candidate
from meshwright.cost.closed_form import KERNELS, model_spec
from meshwright.cost.engine import own_engine
from meshwright.cost.quantities import Job, StageQuantities
from meshwright.cost.states import find_states
from meshwright.spec.catalogue import find_model

HEADS, SEQ_LEN, MICROBATCH = 12, 512, 2
TOKENS = SEQ_LEN * MICROBATCH


def quantities(dropout: float, tp: int, kernels: str = "cuda", recompute: int = 0) -> StageQuantities:
    decoder = replace(find_model("gpt2"), dropout=dropout)
    model = model_spec(decoder, seq_len=SEQ_LEN, compute="fp32", kernels=KERNELS[kernels])
    states, engine = find_states("fsdp2"), own_engine(4)
    job = Job(model=model, global_batch_size=8, states=states, engine=engine, capacity_bytes=1 << 40)
    return StageQuantities(job, Candidate(tp=tp, microbatch_size=MICROBATCH, recompute=recompute), "first")


@pytest.mark.parametrize("tp", [2, 4])
def test_scores_their_mask_and_both_together_are_kept_for_a_ranks_heads(tp: int) -> None:
    with_it, without = quantities(0.1, tp), quantities(0.0, tp)
    scores = 4 * TOKENS * HEADS * SEQ_LEN / tp
    more = float(with_it.kept_by_layer) - float(without.kept_by_layer)
    assert 3 * scores < more < 3.3 * scores  # and masks of the residual stream


def test_one_gpu_keeps_none_of_them() -> None:
    more = float(quantities(0.1, 1).kept_by_layer) - float(quantities(0.0, 1).kept_by_layer)
    assert more < 4 * TOKENS * HEADS * SEQ_LEN / 10


@pytest.mark.parametrize(("kernels", "tensors"), [("cpu", 1), ("cuda", 2.25)])
def test_the_mask_of_all_heads_is_room_that_no_tp_saves(kernels: str, tensors: float) -> None:
    whole = 4 * TOKENS * HEADS * SEQ_LEN
    for tp in (4, 12):
        q = quantities(0.1, tp, kernels, recompute=2)
        assert float(q.transient) > tensors * whole
        assert float(q.working) > (tensors + 1 / tp) * whole
