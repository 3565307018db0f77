"""How many microbatches a stage keeps at once: the closed forms beside the schedules played pass by pass."""

from __future__ import annotations

import pytest

from meshwright.cost.candidate import SCHEDULES, Candidate
from meshwright.cost.stages import in_flight
from meshwright.spec.pipeline import takes
from meshwright.spec.pipeline_play import FORWARD, INPUT, WEIGHT, WHOLE, passes_of


def played(schedule: str, rank: int, pp: int, chunks: int, m: int) -> tuple[int, int]:
    """The most chunks that wait for their last backward pass, and of these those whose pass of inputs is over."""
    kept = parted = most_kept = most_parted = 0
    for one in passes_of(schedule, rank, pp, chunks, m):
        kept, parted = kept + (one.kind == FORWARD), parted + (one.kind == INPUT)
        most_kept, most_parted = max(most_kept, kept), max(most_parted, parted)
        kept, parted = kept - (one.kind in (WEIGHT, WHOLE)), parted - (one.kind == WEIGHT)
    return most_kept, most_parted


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved1f1b", "interleaved-zero-bubble", "zbv"])
def test_the_closed_form_is_what_a_schedule_keeps(schedule: str, pp: int) -> None:
    of_rank = {"interleaved1f1b": (2, 3), "interleaved-zero-bubble": (2, 4), "zbv": (2,)}.get(schedule, (1,))
    for chunks in of_rank:
        for m in (number for number in range(1, 3 * pp + 1) if takes(schedule, pp, number)):
            one = Candidate(pp=pp, chunks=chunks, schedule=SCHEDULES.index(schedule), num_microbatches=m)
            for rank in range(pp):
                kept, parted = played(schedule, rank, pp, chunks, m)
                assert float(in_flight(one, rank)) * chunks == pytest.approx(kept), (chunks, m, rank)
                if schedule == "interleaved-zero-bubble":
                    assert parted == rank + 1
                if schedule == "zbv" and m >= 2 * pp - 1:
                    assert parted == 2 * rank + 1
