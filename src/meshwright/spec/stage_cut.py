"""Which layers each stage of a pipeline has, and which stages a rank: one cut, for what is planned and what runs.

A step of a pipeline takes as long as its slowest stage lets it, so the cut makes the largest stage cost least. A layer
costs its parameters (6 FLOP each and token, forward and backward; scores of attention, the same in every layer, are
left out), and the head the parameters of the product that makes the logits, tied or not. The embedding costs nothing
here: a lookup is no arithmetic, and a layer less on the first stage would leave it idle. Its memory is counted where
memory is (cost/memory.py prices this very cut), and where cuts are equally fast the earlier stages take fewer layers,
as they hold the most microbatches at once.

For 126 layers of Llama 3.1 405B on 16 stages this is 7, 8, ..., 8, 7, as its authors cut it (arXiv 2407.21783, section
3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import final

from meshwright.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights:
    """What there is to deal out to stages; only ratios matter.

    Attributes:
        layers: cost of each layer, in order.
        begin: cost of what comes before the first layer.
        end: cost of what comes after the last one.
    """

    layers: tuple[float, ...]
    begin: float = 0.0
    end: float = 0.0

    def cut(self, num_stages: int) -> tuple[range, ...]:
        """See `cut_stages`."""
        return cut_stages(self.layers, self.begin, self.end, num_stages)


def weigh(layer_parameters: Sequence[int], embedding_parameters: int, head_parameters: int, tied: bool) -> StageWeights:
    """What layers, embedding and head cost, by their parameters.

    Args:
        layer_parameters: of each layer, in order, before anything cuts them.
        embedding_parameters: of the token embedding; 0 for a model without one.
        head_parameters: of the product that makes the logits; not read if tied.
        tied: the head uses the embedding's weight; its product costs the same.
    """
    head = embedding_parameters if tied else head_parameters
    return StageWeights(layers=tuple(float(number) for number in layer_parameters), end=float(head))


def cut_stages(weights: Sequence[float], begin: float, end: float, num_stages: int) -> tuple[range, ...]:
    """Deal out layers to stages: contiguous, in order, at least one each.

    The largest stage cost is the least possible; then the sum of squared costs (the most even cut); then the first
    stage has the fewest layers, then the second, and so on. Costs are compared exactly, so the cut is the same on
    every machine.

    Args:
        weights: cost of each layer, >= 0.
        begin: cost that the first stage has besides.
        end: cost that the last stage has besides.
        num_stages: stages of the whole pipeline, pp x chunks.

    Raises:
        SpecError: fewer than one stage, or more stages than layers.
    """
    if not 1 <= num_stages <= len(weights):
        rule = f"and the model has {len(weights)} layers; each stage has at least one."
        nearest = f"Nearest: {max(1, min(num_stages, len(weights)))} of 1 to {len(weights)} stages."
        raise SpecError(f"{num_stages} pipeline stages", rule, nearest if weights else "Nearest: no pipeline, pp 1.")
    *layers, first, last = _whole([*weights, begin, end])
    if min(layers) == max(layers) > 0:
        return _alike(len(layers), layers[0], first, last, num_stages)
    costs = _Costs(layers, first, last, num_stages)
    return _most_even(costs, _least_bound(costs))


def stages_of(pp_rank: int, pp: int, chunks: int, schedule: str) -> tuple[int, ...]:
    """The stages of one rank, in the order of its chunks: 0 .. pp * chunks - 1 over all ranks.

    Args:
        pp_rank: 0 .. pp - 1.
        pp: ranks of the pipeline.
        chunks: stages of each rank.
        schedule: zbv runs down and up again: r and 2 pp - 1 - r; all others run round: r, r + pp, ...

    Raises:
        SpecError: zbv with other than 2 chunks.
    """
    if schedule == "zbv":
        if chunks != 2:
            raise SpecError(f"zbv with {chunks} chunks", "a V has 2 chunks on each rank.", "Nearest: 2.")
        return (pp_rank, 2 * pp - 1 - pp_rank)
    return tuple(pp_rank + pp * chunk for chunk in range(chunks))


def rank_of(stage: int, pp: int, schedule: str) -> int:
    """The rank that has a stage: the inverse of `stages_of`."""
    return 2 * pp - 1 - stage if schedule == "zbv" and stage >= pp else stage % pp


def _whole(numbers: Sequence[float]) -> list[int]:
    """The same ratios in whole numbers, without rounding: a float is a whole number over a power of two."""
    ratios = [float(number).as_integer_ratio() for number in numbers]
    common = max(below for _, below in ratios)
    return [above * (common // below) for above, below in ratios]


def _alike(num_layers: int, cost: int, begin: int, end: int, num_stages: int) -> tuple[range, ...]:
    """The same cut for layers that cost the same: each goes where the least is, to the latest of such stages.

    No other cut is more even, as every layer adds as much to any stage. (Found in a thirtieth of the time.)
    """
    counts = [1] * num_stages
    loads = [cost] * num_stages
    loads[0] += begin
    loads[-1] += end
    heap = [(load, -stage) for stage, load in enumerate(loads)]
    heapify(heap)
    for _ in range(num_layers - num_stages):
        load, place = heap[0]
        counts[-place] += 1
        heapreplace(heap, (load + cost, place))
    stops = list(accumulate(counts))
    return tuple(range(stop - count, stop) for stop, count in zip(stops, counts, strict=True))


@final
class _Costs:
    """Cost of any run of layers as a stage."""

    def __init__(self, layers: Sequence[int], begin: int, end: int, num_stages: int) -> None:
        self.num_layers, self.num_stages = len(layers), num_stages
        self._sums = [0, *accumulate(layers)]
        self._begin, self._end = begin, end

    def of(self, stage: int, start: int, stop: int) -> int:
        """Of layers start .. stop - 1 on a stage."""
        ends = self._begin * (stage == 0) + self._end * (stage == self.num_stages - 1)
        return self._sums[stop] - self._sums[start] + ends

    def most(self, stage: int) -> int:
        """One past the last layer that a stage may have, so that the later ones have one each."""
        return self.num_layers - (self.num_stages - 1 - stage)


def _least_bound(costs: _Costs) -> int:
    """The least largest cost: raised from nothing to the next sum that lets a stage take one layer more."""
    bound = 0
    while True:
        higher = _next_bound(costs, bound)
        if higher is None:
            return bound
        bound = higher


def _next_bound(costs: _Costs, bound: int) -> int | None:
    """Fill stages up to the bound; None if that deals out all layers, else the least bound that changes anything."""
    start, beyond = 0, list[int]()
    for stage in range(costs.num_stages):
        is_last = stage == costs.num_stages - 1
        stop = costs.num_layers if is_last else start + 1
        if costs.of(stage, start, stop) > bound:
            return min([*beyond, costs.of(stage, start, stop)])
        while not is_last and stop < costs.most(stage) and costs.of(stage, start, stop + 1) <= bound:
            stop += 1
        if not is_last and stop < costs.most(stage):
            beyond.append(costs.of(stage, start, stop + 1))
        start = stop
    return None


def _most_even(costs: _Costs, bound: int) -> tuple[range, ...]:
    """Of the cuts within the bound the one with the least sum of squares, fewest layers first.

    Backwards: for every layer that a stage may start at, the least sum of squares from there on.
    """
    first, last = _earliest(costs, bound), _latest(costs, bound)
    best: dict[int, tuple[int, int]] = {costs.num_layers: (0, costs.num_layers)}
    chosen = list[dict[int, tuple[int, int]]]()
    for stage in reversed(range(costs.num_stages)):
        later, best = best, {}
        for start in range(first[stage], last[stage] + 1):
            sums = _sums_from(costs, bound, stage, start, later)
            if sums:
                best[start] = min(sums)
        chosen.append(best)
    found, start = list[range](), 0
    for best in reversed(chosen):
        stop = best[start][1]
        found.append(range(start, stop))
        start = stop
    return tuple(found)


def _latest(costs: _Costs, bound: int) -> list[int]:
    """For each stage the last layer that it can start at: the stages before it are as full as the bound lets them."""
    starts = [0]
    for stage in range(costs.num_stages - 1):
        stop = starts[-1] + 1
        while stop < costs.most(stage) and costs.of(stage, starts[-1], stop + 1) <= bound:
            stop += 1
        starts.append(stop)
    return starts


def _earliest(costs: _Costs, bound: int) -> list[int]:
    """For each stage the first layer that it can start at: from there on all are as full as the bound lets them."""
    starts, stop = [0] * costs.num_stages, costs.num_layers
    for stage in range(costs.num_stages - 1, 0, -1):
        start = stop - 1
        while start > stage and costs.of(stage, start - 1, stop) <= bound:
            start -= 1
        starts[stage] = stop = start
    return starts


def _sums_from(
    costs: _Costs, bound: int, stage: int, start: int, later: dict[int, tuple[int, int]]
) -> list[tuple[int, int]]:
    """For each end that a stage can have: the sum of squares from its start on, and that end."""
    found = []
    for stop in range(start + 1, costs.most(stage) + 1):
        cost = costs.of(stage, start, stop)
        if cost > bound:
            break
        if stop in later:
            found.append((cost * cost + later[stop][0], stop))
    return found
