"""Pipeline schedules pass by pass, in the order in which torch.distributed.pipelining runs them, and played on a clock.

A rank works through its passes in order; a pass starts when the rank is free and what it needs is there:

    forward   of stage s needs the forward pass of stage s - 1
    input     of stage s (or a whole backward pass) needs its own forward pass, and the input pass of stage s + 1
    weight    needs its own input pass

The orders are those of torch 2.13, schedules.py: `_get_1f1b_rank_ops` and `ScheduleZBVZeroBubble`, which follow
Narayanan et al., arXiv 2104.04473, and Qi et al., arXiv 2401.10241. They are compared with torch's own lists in
tests/parallel/test_schedules_against_torch.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, final

from meshwright.spec.stage_cut import rank_of

FORWARD: Final = "forward"
INPUT: Final = "input"
WEIGHT: Final = "weight"
WHOLE: Final = "whole"
"""A backward pass of inputs and weights together."""

COSTS: Final[Mapping[str, float]] = {FORWARD: 1.0, INPUT: 1.0, WEIGHT: 1.0, WHOLE: 2.0}
"""A matrix product in forward, one for the gradient of its input, one for that of its weight: as many FLOP each."""


@final
class Pass(NamedTuple):
    """One pass over one microbatch.

    Attributes:
        kind: forward | input | weight | whole.
        stage: 0 .. pp * chunks - 1.
        microbatch: 0 .. num_microbatches - 1.
    """

    kind: str
    stage: int
    microbatch: int


def passes_of(schedule: str, rank: int, pp: int, chunks: int, num_microbatches: int) -> list[Pass]:
    """What one rank does in a step, in order.

    Args:
        schedule: its word.
        rank: 0 .. pp - 1.
        pp: ranks of the pipeline.
        chunks: stages of a rank.
        num_microbatches: of a step on one data-parallel rank; a legal number for the schedule.
    """
    m = num_microbatches
    match schedule:
        case "gpipe":
            return [Pass(kind, rank, i) for kind in (FORWARD, WHOLE) for i in range(m)]
        case "1f1b":
            return list(_one_by_one(rank, min(m, pp - rank), m))
        case "zbv":
            return _v_shaped(rank, pp, m)
        case _:
            return list(_interleaved(rank, pp, chunks, m, splits=schedule == "interleaved-zero-bubble"))


def _one_by_one(rank: int, warm: int, m: int) -> Iterator[Pass]:
    """1F1B: some forward passes, then one backward and one forward in turn."""
    yield from (Pass(FORWARD, rank, i) for i in range(warm))
    for i in range(m):
        yield Pass(WHOLE, rank, i)
        if warm + i < m:
            yield Pass(FORWARD, rank, warm + i)


def _interleaved(rank: int, pp: int, chunks: int, m: int, *, splits: bool) -> Iterator[Pass]:
    """Rounds of microbatches through each chunk in turn; with `splits` a weight pass follows `rank` passes later."""
    per_round = m // max(1, m // pp)
    total = m * chunks
    warm = min((chunks - 1) * per_round + (1 if splits else 2) * (pp - 1 - rank), total)
    forwards = _in_turn(FORWARD, range(total), rank, pp, chunks, per_round, backwards=False)
    backwards = _in_turn(INPUT if splits else WHOLE, range(total), rank, pp, chunks, per_round, backwards=True)
    weights = (one._replace(kind=WEIGHT) for one in backwards)
    yield from forwards[:warm]
    for i in range(total):
        yield from forwards[warm + i : warm + i + 1]
        yield backwards[i]
        if splits and i >= rank:
            yield next(weights)
    if splits:
        yield from weights


def _in_turn(
    kind: str, steps: range, rank: int, pp: int, chunks: int, per_round: int, *, backwards: bool
) -> list[Pass]:
    """Passes of one kind: a round of microbatches on one chunk, then on the next."""
    done = [0] * chunks
    found = []
    for step in steps:
        chunk = step // per_round % chunks
        chunk = chunks - 1 - chunk if backwards else chunk
        found.append(Pass(kind, chunk * pp + rank, done[chunk]))
        done[chunk] += 1
    return found


def _v_shaped(rank: int, pp: int, m: int) -> list[Pass]:
    """ZB-V: made for at least 2 pp - 1 microbatches; what a step does not have is left out."""
    down, up = rank, 2 * pp - 1 - rank
    made = max(2 * pp - 1, m)
    clerk = _Clerk()
    clerk.do(*[(FORWARD, down)] * (2 * (pp - rank) - 1))
    clerk.do(*[(FORWARD, up), (FORWARD, down)] * rank)
    clerk.do(*[(FORWARD, up), (INPUT, up), (WEIGHT, up)] * (pp - rank))
    while clerk.count(FORWARD, up) < clerk.count(FORWARD, down) or clerk.count(FORWARD, down) < made:
        if clerk.count(FORWARD, down) < made:
            clerk.do((FORWARD, down))
        clerk.do((INPUT, down), (WEIGHT, down), (FORWARD, up), (INPUT, up), (WEIGHT, up))
    clerk.do(*[(INPUT, down), (INPUT, up)] * rank)
    clerk.do(*[(INPUT, down), (WEIGHT, down)] * (pp - rank))
    clerk.do(*[(WEIGHT, up)] * (clerk.count(INPUT, up) - clerk.count(WEIGHT, up)))
    clerk.do(*[(WEIGHT, down)] * (clerk.count(INPUT, down) - clerk.count(WEIGHT, down)))
    return [one for one in clerk.passes if one.microbatch < m]


@final
class _Clerk:
    """Writes passes down; each kind on each stage takes microbatches in order."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self._counts: dict[tuple[str, int], int] = {}

    def count(self, kind: str, stage: int) -> int:
        """Passes of a kind on a stage so far."""
        return self._counts.get((kind, stage), 0)

    def do(self, *passes: tuple[str, int]) -> None:
        """Add passes, each on the next microbatch."""
        for kind, stage in passes:
            self.passes.append(Pass(kind, stage, self.count(kind, stage)))
            self._counts[kind, stage] = self.count(kind, stage) + 1


def played_s(orders: Sequence[Sequence[Pass]], num_stages: int, costs: Mapping[str, float] = COSTS) -> float:
    """The time from the first pass of any rank to the end of the last.

    Args:
        orders: for each rank its passes.
        num_stages: over all ranks.
        costs: seconds of each kind of pass, on every stage.
    """
    ended: dict[Pass, float] = {}
    free, places = [0.0] * len(orders), [0] * len(orders)
    waiting = True
    while waiting:
        waiting = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                needs = _needs(order[places[rank]], num_stages)
                if any(one not in ended for one in needs):
                    break
                waiting = True
                start = max([free[rank], *(ended[one] for one in needs)])
                one = order[places[rank]]
                free[rank] = ended[_seen(one)] = start + costs[one.kind]
                places[rank] += 1
    assert all(place == len(order) for place, order in zip(places, orders, strict=True)), "the schedule stands still"
    return max(free)


def _seen(one: Pass) -> Pass:
    """As others wait for it: a whole backward pass makes gradients of inputs too."""
    return one._replace(kind=INPUT) if one.kind == WHOLE else one


def _needs(one: Pass, num_stages: int) -> list[Pass]:
    """The passes that must have ended before."""
    if one.kind == WEIGHT:
        return [one._replace(kind=INPUT)]
    if one.kind == FORWARD:
        return [one._replace(stage=one.stage - 1)] if one.stage else []
    found = [one._replace(kind=FORWARD)]
    return [*found, Pass(INPUT, one.stage + 1, one.microbatch)] if one.stage + 1 < num_stages else found


@lru_cache(maxsize=256)
def played_idle_share(schedule: str, pp: int, chunks: int, num_microbatches: int) -> float:
    """(time - work) / time of a whole step, over all ranks."""
    orders = [passes_of(schedule, rank, pp, chunks, num_microbatches) for rank in range(pp)]
    assert all(rank_of(one.stage, pp, schedule) == rank for rank, order in enumerate(orders) for one in order)
    work = sum(COSTS[one.kind] for order in orders for one in order) / pp
    time = played_s(orders, pp * chunks)
    return (time - work) / time
