"""The passes that spec/pipeline_play.py lists are those that torch's schedules run, in their order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from meshwright.spec.pipeline_play import FORWARD, INPUT, WEIGHT, WHOLE, Pass, passes_of

KINDS = {"F": FORWARD, "I": INPUT, "W": WEIGHT, "B": WHOLE}
CLASSES: dict[str, Any] = {
    "interleaved1f1b": schedules.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


def torchs(schedule: str, rank: int, pp: int, chunks: int, m: int) -> list[Pass]:
    """What torch would run; the schedule's own function, without stages and process groups."""
    rounds = max(1, m // pp)
    facts = SimpleNamespace(
        pp_group_size=pp, n_local_stages=chunks, _n_microbatches=m, number_of_rounds=rounds,
        microbatches_per_round=m // rounds, num_stages=pp * chunks,
    )  # fmt: skip
    actions = CLASSES[schedule]._calculate_single_rank_operations(facts, rank)
    return [Pass(KINDS[one.computation_type.value], one.stage_index, one.microbatch_index) for one in actions if one]


@pytest.mark.parametrize("schedule", CLASSES)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_every_pass_is_where_torch_has_it(schedule: str, pp: int, chunks: int, rounds: int) -> None:
    chunks = 2 if schedule == "zbv" else chunks
    for rank in range(pp):
        m = pp * rounds
        assert passes_of(schedule, rank, pp, chunks, m) == torchs(schedule, rank, pp, chunks, m)
