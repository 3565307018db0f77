"""Candidate: a layout with its knobs, as numbers or as numpy columns of many. What the cost room prices."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.layout import Layout
from meshwright.spec.pipeline import SPLIT

RECOMPUTE: Final = ("none", "selective", "full")
SCHEDULES: Final = ("gpipe", "1f1b", "interleaved1f1b", "interleaved-zero-bubble", "zbv", "zb-1p", "zb-2p")
"""The first five are PyTorch's and can be asked for; the last two only appear in published measurements."""

PARTED: Final = tuple(SCHEDULES.index(name) for name in SPLIT)
"""Schedules whose backward passes come in two."""

V_SHAPED: Final = SCHEDULES.index("zbv")
"""The one whose ranks have two stages that lie opposite each other."""

OFFLOADS: Final = ("none", "optimizer")

Column = Any
"""An int, or an int64 array of one number for each candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """One candidate, or many of them as equally long columns; a plain int holds for all.

    Attributes:
        dp_replicate: replicas.
        dp_shard: ranks that ZeRO cuts over (without cp; a group of shards spans dp_shard * cp ranks).
        zero_stage: 0 .. 3.
        tp: ranks that matrices are cut over; sequence parallelism goes with it.
        pp: pipeline stages.
        cp: ranks that a sequence is cut over.
        ep: ranks that experts are dealt out to; divides dp_shard * cp * dp_replicate.
        chunks: model chunks per stage (interleaved schedules, zbv: 2), else 1.
        schedule: index into SCHEDULES.
        microbatch_size: samples per forward pass on one data-parallel rank.
        num_microbatches: of a step on one data-parallel rank.
        recompute: index into RECOMPUTE.
        offload: index into OFFLOADS.
        sync_every: 1 if gradients are reduced at each microbatch, 0 at the last.
    """

    dp_replicate: Column = 1
    dp_shard: Column = 1
    zero_stage: Column = 0
    tp: Column = 1
    pp: Column = 1
    cp: Column = 1
    ep: Column = 1
    chunks: Column = 1
    schedule: Column = 1
    microbatch_size: Column = 1
    num_microbatches: Column = 1
    recompute: Column = 0
    offload: Column = 0
    sync_every: Column = 0

    def __len__(self) -> int:
        return max(np.size(getattr(self, one.name)) for one in fields(self))

    @property
    def world_size(self) -> Column:
        """Ranks: pp * dp_replicate * dp_shard * cp * tp."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    def take(self, rows: NDArray[Any]) -> Columns:
        """The candidates at `rows` (indices, or a mask)."""
        return Columns(
            **{
                one.name: value if np.ndim(value := getattr(self, one.name)) == 0 else value[rows]
                for one in fields(self)
            }
        )

    def at(self, row: int) -> Candidate:
        """One candidate."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return Candidate(**{name: int(v if np.ndim(v) == 0 else v[row]) for name, v in values.items()})


class Candidate(Columns):
    """One candidate: every column is an int."""

    __slots__ = ()

    @property
    def layout(self) -> Layout:
        """What a recipe can say of it; cp and ep are planned, not run yet."""
        return Layout(
            dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, zero_stage=self.zero_stage, tp=self.tp, pp=self.pp
        )

    @property
    def word(self) -> str:
        """The layout's word, with cp and ep: `zero3x16+tp8+cp2`."""
        extra = [f"{name}{degree}" for name, degree in (("cp", self.cp), ("ep", self.ep)) if degree > 1]
        word = self.layout.word
        return "+".join(([] if word == "single" and extra else [word]) + extra)
