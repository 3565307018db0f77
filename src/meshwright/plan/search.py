"""Reject, price, choose: the exact optimum of a stated order over the whole space.

What is chosen is the first by ORDER. Nothing is pruned on a guess: every legal row is priced, and the first one is
found by comparing whole columns, so it is what a loop over all rows finds (tests/plan/test_search.py has that loop).

Until step time can be predicted, the order is the rule that users know: the simplest layout that fits. A layout is
taken with full recompute only where none fits without it: it costs a third more computation, and a ZeRO stage or
collectives on fast links cost less. On one rung, bytes sent, recompute and pipeline bubbles are compared as one number
(plan/price.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.candidate import RECOMPUTE, Columns
from meshwright.cost.memory import Memory, estimate
from meshwright.cost.traffic import traffic
from meshwright.plan.price import price_s
from meshwright.plan.rules import first_broken
from meshwright.plan.setting import Setting
from meshwright.plan.space import Space

FULL: Final = RECOMPUTE.index("full")
ALIKE: Final = 0.03
"""Prices that differ by less are no reason to take the less simple."""

CHUNK: Final = 16384
"""Rows priced at once: their columns stay in the processor's cache."""

ORDER: Final = (
    "what fits before what does not, and of that what misses least",
    "what this version runs before what it does not, where a run is to start",
    "what is not planned before cp, ep and offload, which are",
    "what fits before what is tight",
    "the rule: ddp, zero1, zero2, zero3 and hsdp, tp, pp; then the same with full recompute",
    "a lower price by 3 % or more: what is sent, computed again and waited for, at the data sheet's rates",
    "fewer parts: axes, chunks of a stage, recompute",
    "a lower price at all",
    "a larger microbatch",
)
"""What is compared, the first difference decides; among equals, the row that comes first in the space."""

Indices = NDArray[np.int64]
Amounts = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Everything a search knows.

    Attributes:
        space: all rows that were considered.
        broken: for each of them the number of the first rule that it breaks, 0 for none.
        legal: their rows in the space, ascending. What follows has a number for each of these.
        columns: the legal candidates.
        memory: their memory.
        sent_bytes: per rank and step.
        price_s: see plan/price.py.
        keys: what is compared, in the order of ORDER; smaller is better.
    """

    space: Space
    broken: Indices
    legal: Indices
    columns: Columns
    memory: Memory
    sent_bytes: Amounts
    price_s: Amounts
    keys: tuple[NDArray[Any], ...]

    def first(self, mask: NDArray[np.bool_]) -> int | None:
        """The place of the best legal candidate of those in the mask; None if it is empty."""
        places = np.flatnonzero(mask)
        for key in self.keys:
            values = key[places]
            places = places[values == values.min()] if len(places) > 1 else places
        return int(places[0]) if len(places) else None

    def best(self, mask: NDArray[np.bool_] | None = None) -> Indices:
        """The place of each layout's best candidate, layouts in their order; of those in the mask, if one is given."""
        places = np.arange(len(self.legal)) if mask is None else np.flatnonzero(mask)
        layout = self.space.layout[self.legal[places]]
        return places[_best_of_each(layout, [key[places] for key in self.keys])]

    def ranking(self) -> Indices:
        """The best candidate of every layout, the best layout first."""
        best = self.best()
        return best[np.lexsort([key[best] for key in reversed(self.keys)])]


def search(setting: Setting, space: Space, *, runs_first: bool = False) -> Found:
    """Find the best candidate of each layout.

    Args:
        setting: the model, the batch and the cluster.
        space: what to look at.
        runs_first: put what this version runs first, tight or not: a run is to start.
    """
    broken = first_broken(setting, space.columns)
    legal = np.flatnonzero(broken == 0)
    columns = space.columns.take(legal)
    memory, sent, price = _priced(setting, columns)
    keys = order_keys(columns, memory, price, runs_first)
    return Found(
        space=space,
        broken=broken,
        legal=legal,
        columns=columns,
        memory=memory,
        sent_bytes=sent,
        price_s=price,
        keys=keys,
    )


def _priced(setting: Setting, columns: Columns) -> tuple[Memory, Amounts, Amounts]:
    """Memory, bytes sent and price of every candidate."""
    memories, sents, prices = [], [np.zeros(0)], [np.zeros(0)]
    for part in _chunks(columns):
        sent = traffic(setting.job, part)
        memories.append(estimate(setting.job, part))
        sents.append(sent.total_bytes)
        prices.append(price_s(setting.job, setting.cluster, part, sent))
    return _joined(memories), np.concatenate(sents), np.concatenate(prices)


def _joined(memories: Sequence[Memory]) -> Memory:
    pieces = {one.name: [getattr(memory, one.name) for memory in memories] for one in fields(Memory)}
    columns: dict[str, Any] = {
        name: np.concatenate(piece) if piece else np.zeros(0, np.int64) for name, piece in pieces.items()
    }
    return Memory(**columns)


def _chunks(columns: Columns) -> Iterator[Columns]:
    for start in range(0, len(columns), CHUNK):
        yield columns.take(np.arange(start, min(start + CHUNK, len(columns))))


def runs(columns: Columns) -> Any:
    """Is this run by this version? All of a `Layout` is; cp, ep and offload are planned."""
    return ~is_planned(columns)


def is_planned(columns: Columns) -> Any:
    """Uses cp, ep or offload, which come after everything else."""
    return (np.asarray(columns.cp) > 1) | (np.asarray(columns.ep) > 1) | (np.asarray(columns.offload) > 0)


def rung_of(columns: Columns) -> Any:
    """Place in the rule, as in ORDER; smaller is simpler."""
    c = columns
    is_hybrid = (np.asarray(c.dp_replicate) > 1) & (np.asarray(c.dp_shard) > 1)
    axis = np.select([np.asarray(c.pp) > 1, np.asarray(c.tp) > 1, is_hybrid], [5, 4, 3], c.zero_stage)
    return axis + 10 * (np.asarray(c.recompute) == FULL)


def num_parts(columns: Columns) -> Any:
    """How much a candidate has to explain: axes, chunks, recompute."""
    c = columns
    axes = [np.asarray(degree) > 1 for degree in (c.dp_replicate, c.dp_shard, c.tp, c.pp, c.chunks)]
    return np.sum([*np.broadcast_arrays(*axes), np.asarray(c.recompute) > 0], axis=0)


def order_keys(columns: Columns, memory: Memory, price_s: Amounts, runs_first: bool) -> tuple[NDArray[Any], ...]:
    """What ORDER compares, a column each; smaller is better."""
    misses = memory.fits == 0
    return (
        np.where(misses, memory.reserved_bytes, 0.0),
        np.asarray(~runs(columns) & runs_first),
        is_planned(columns),
        2 - memory.fits,
        rung_of(columns),
        np.floor(np.log(price_s) / np.log1p(ALIKE)),
        num_parts(columns),
        price_s,
        -np.asarray(columns.microbatch_size),
    )


def _best_of_each(layout: Indices, keys: Sequence[NDArray[Any]]) -> Indices:
    """The place of the best row of each layout; rows of a layout stand together."""
    if not len(layout):
        return np.zeros(0, np.int64)
    starts = np.flatnonzero(np.diff(layout, prepend=layout[0] - 1))
    group = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(layout)))
    alive = np.ones(len(layout), bool)
    for key in keys:
        values = np.where(alive, key, np.inf)
        alive &= values == np.minimum.reduceat(values, starts)[group]
    places = np.flatnonzero(alive)
    return places[np.unique(group[places], return_index=True)[1]]
