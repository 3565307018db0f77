"""The space: every layout that uses the whole cluster, with every setting of its knobs, as columns.

Degrees are enumerated as divisors, so that no row has a wrong product. Some rows break a rule all the same
(plan/rules.py says which): they are what a user would try, and are counted with the rule that they break.

    tp               divisors of the devices, up to the first beyond a node
    pp               divisors of what is left, up to the first beyond the number of layers
    cp               divisors of what is left that leave a rank at least 1024 tokens of a sample
    ep               divisors of the ranks that are left, up to the number of experts
    dp_replicate x dp_shard x zero_stage      all splits of the rest; stage 0 where nothing is sharded, else 1, 2 and 3
    microbatch_size  divisors of a rank's samples per step: the largest up to 1, 2, 4, ... 64
    pp_schedule      gpipe, 1f1b, interleaved with 2, 3, 4 or 6 chunks a stage, zero-bubble with 2 or 4, zbv
    recompute        none, selective, full
    sync             stages 2 and 3 reduce gradients at every microbatch, which is what they are for; else at the last,
                     and pipelines once their schedule is over
    offload          the optimizer's state, without pipeline stages

Of cp, ep and offload, which are planned and not run yet, one at a time is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.candidate import OFFLOADS, RECOMPUTE, SCHEDULES, Columns
from meshwright.spec.model_spec import ModelSpec
from meshwright.spec.nearest import divisors
from meshwright.spec.sections import CHUNKED_SCHEDULES

LARGEST_MICROBATCH: Final = 64
FEWEST_TOKENS: Final = 1024
"""Of a sample on one rank of cp: below it, attention has too little to hide the exchange of keys and values behind."""

CUT_AXES: Final = ("dp_replicate", "dp_shard", "zero_stage", "tp", "pp", "cp", "ep")
KNOB_AXES: Final = ("microbatch_size", "num_microbatches", "recompute", "schedule", "chunks", "offload", "sync_every")

Cut = tuple[int, int, int, int, int, int, int]
"""The degrees of one layout, in the order of CUT_AXES."""

PIPELINES: Final = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved1f1b", 2),
    ("interleaved1f1b", 3),
    ("interleaved1f1b", 4),
    ("interleaved1f1b", 6),
    ("interleaved-zero-bubble", 2),
    ("interleaved-zero-bubble", 4),
    ("zbv", 2),
)
"""Schedules with the chunks of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What the user has fixed; None is for the search to choose.

    Attributes:
        microbatch_size: samples per forward pass on one data-parallel rank.
        recompute: none | selective | full.
        sync: last | every.
        schedule: of a pipeline.
        chunks: stages of a rank, for schedules that have several.
        offload: none | optimizer.
    """

    microbatch_size: int | None = None
    recompute: str | None = None
    sync: str | None = None
    schedule: str | None = None
    chunks: int | None = None
    offload: str | None = None


@dataclass(frozen=True, slots=True)
class Space:
    """Rows to look at.

    Attributes:
        columns: one row for each layout and setting of its knobs; rows of a layout stand together.
        layout: for each row the number of its layout, ascending.
        num_layouts: how many there are.
    """

    columns: Columns
    layout: NDArray[np.int64]
    num_layouts: int


def cuts_of(num_devices: int, node: int, model: ModelSpec) -> list[Cut]:
    """Every layout over exactly so many devices, the simplest first.

    Args:
        num_devices: all of them are used.
        node: devices that the fast link joins.
        model: bounds pp by its layers, cp by its sequence, ep by its experts; no tp where its heads are unknown.
    """
    found: list[Cut] = []
    widest = node if model.n_heads else 1
    for tp in _up_to_first_beyond(divisors(num_devices), widest):
        for pp in _up_to_first_beyond(divisors(num_devices // tp), max(model.n_layers, 1)):
            ranks = num_devices // (tp * pp)
            for cp in _sequence_cuts(ranks, model.seq_len):
                found += _rest(ranks // cp, tp, pp, cp, model)
    return sorted(found, key=_plainness)


def _plainness(cut: Cut) -> tuple[int, ...]:
    """Sorts layouts as users try them: fewer axes first, HSDP after ZeRO over all ranks."""
    replicate, shard, stage, tp, pp, cp, ep = cut
    return (ep, cp, pp, tp, replicate > 1 and shard > 1, stage, replicate)


def _up_to_first_beyond(ascending: Sequence[int], limit: int) -> list[int]:
    """The numbers up to the limit, and the next, which shows the rule."""
    inside = [number for number in ascending if number <= limit]
    return inside + list(ascending[len(inside) : len(inside) + 1])


def _sequence_cuts(ranks: int, seq_len: int) -> list[int]:
    return [cp for cp in divisors(ranks) if cp == 1 or cp * FEWEST_TOKENS <= seq_len]


def _rest(ranks: int, tp: int, pp: int, cp: int, model: ModelSpec) -> Iterator[Cut]:
    """Splits of the data-parallel ranks; experts are dealt out among the ranks of one shard group."""
    for shard in divisors(ranks):
        for stage in (0,) if shard == 1 else (1, 2, 3):
            yield (ranks // shard, shard, stage, tp, pp, cp, 1)
    if cp == 1 and model.n_experts:
        for ep in [ep for ep in divisors(ranks) if 1 < ep <= model.n_experts]:
            for stage in (1, 2, 3):
                yield (1, ranks, stage, tp, pp, cp, ep)


def spread(cuts: Sequence[Cut], global_batch_size: int, knobs: Knobs = Knobs()) -> Space:
    """Each layout with every setting of its knobs.

    Args:
        cuts: the layouts.
        global_batch_size: samples per optimizer step.
        knobs: what is fixed.
    """
    kinds = [_Kind.of(cut, global_batch_size) for cut in cuts]
    made = {kind: _settings(kind, knobs) for kind in dict.fromkeys(kinds)}
    tables = [made[kind] for kind in kinds]
    lengths = [len(table) for table in tables]
    layout = np.repeat(np.arange(len(cuts)), lengths)
    wide = np.array(cuts, dtype=np.int64).reshape(-1, len(CUT_AXES)).T[:, layout]
    narrow = np.concatenate(tables).T if tables else np.zeros((len(KNOB_AXES), 0), np.int64)
    columns = dict(zip(CUT_AXES, wide, strict=True)) | dict(zip(KNOB_AXES, np.ascontiguousarray(narrow), strict=True))
    return Space(Columns(**columns), layout, len(cuts))


@final
class _Kind(NamedTuple):
    """What the knobs of a layout depend on.

    Attributes:
        share: samples of a data-parallel rank per step; 0 where the batch does not divide.
        zero_stage: of the layout.
        has_stages: pp > 1.
        is_plain: neither cp nor ep.
    """

    share: int
    zero_stage: int
    has_stages: bool
    is_plain: bool

    @classmethod
    def of(cls, cut: Cut, global_batch_size: int) -> _Kind:
        replicate, shard, stage, _, pp, cp, ep = cut
        share, rest = divmod(global_batch_size, replicate * shard)
        return cls(0 if rest else share, stage, pp > 1, cp == ep == 1)


def _settings(kind: _Kind, knobs: Knobs) -> NDArray[Any]:
    """Every setting of the knobs, a row each, in the order of KNOB_AXES."""
    usual = kind.zero_stage >= 2 and not kind.has_stages
    sync = int(usual if knobs.sync is None else knobs.sync == "every")
    rows = [
        (micro, max(kind.share // micro, 1), recompute, schedule, chunks, offload, sync)
        for micro, recompute, (schedule, chunks), offload in product(
            _microbatches(kind.share, knobs.microbatch_size),
            _indices(RECOMPUTE, knobs.recompute),
            _pipelines(kind, knobs.schedule, knobs.chunks),
            _offloads(kind, knobs.offload),
        )
    ]
    return np.array(rows, dtype=np.int64)


def _microbatches(share: int, fixed: int | None) -> list[int]:
    if fixed is not None:
        return [fixed]
    sizes = [size for size in range(1, min(share, LARGEST_MICROBATCH) + 1) if share % size == 0] or [1]
    return sorted({max(size for size in sizes if size <= bound) for bound in (1, 2, 4, 8, 16, 32, 64)})


def _indices(words: Sequence[str], fixed: str | None) -> list[int]:
    return list(range(len(words))) if fixed is None else [words.index(fixed)]


def _pipelines(kind: _Kind, fixed: str | None, chunks: int | None) -> list[tuple[int, int]]:
    if not kind.has_stages:
        return [(SCHEDULES.index("1f1b"), 1)]
    if chunks is not None:
        names = [name for name in CHUNKED_SCHEDULES if fixed in (None, name) and (chunks == 2 or name != "zbv")]
        return [(SCHEDULES.index(name), chunks) for name in names]
    return [(SCHEDULES.index(name), many) for name, many in PIPELINES if fixed in (None, name)]


def _offloads(kind: _Kind, fixed: str | None) -> list[int]:
    if fixed is not None:
        return [OFFLOADS.index(fixed)]
    return [0, 1] if kind.is_plain and not kind.has_stages else [0]
