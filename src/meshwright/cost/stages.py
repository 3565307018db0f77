"""What one pipeline stage holds: its layers, their parameters and bytes, and the microbatches in flight on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.candidate import RECOMPUTE, SCHEDULES, V_SHAPED, Candidate, Column, Columns
from meshwright.spec.model_spec import Bytes, ModelSpec, UnitSpec
from meshwright.spec.pipeline_play import FORWARD, INPUT, WEIGHT, WHOLE, passes_of
from meshwright.spec.stage_cut import StageWeights, stages_of, weigh

STAGES: Final = ("first", "middle", "last")
NUMBERS: Final = 4 + 4 * (2 * len(RECOMPUTE) + 1)
"""Of a layer, see `_row`."""

KEY: Final = 1 << 16
"""More than twice the chunks of a stage ever are."""

Rows = NDArray[np.float64]

Stage = str | int
"""One of STAGES, or a rank of the pipeline, 0 .. pp - 1."""


@dataclass(frozen=True, slots=True)
class Form:
    """`spec.model_spec.Bytes` as columns: one linear form for each candidate."""

    fixed: Column
    inner: Column
    residual: Column
    normed: Column

    def at(self, tokens: Column, tp: Column, residual_cut: Column, normed_cut: Column) -> Column:
        """Bytes for so many tokens."""
        return self.fixed + tokens * (self.inner / tp + self.residual / residual_cut + self.normed / normed_cut)


@dataclass(frozen=True, slots=True)
class Content:
    """Sums over the layers of one stage, as columns.

    Attributes:
        layers: how many.
        parameters: all of them, before tp and ep.
        expert: of these, dealt out by ep.
        replicated: of these, whole on every tp rank.
        frozen: of these, not trained.
        saved: by recompute mode, bytes kept.
        saved_under_tp: the same where tp cuts the layers.
        parted: kept between a backward pass of inputs and that of weights.
    """

    layers: Column
    parameters: Column
    expert: Column
    replicated: Column
    frozen: Column
    saved: tuple[Form, Form, Form]
    saved_under_tp: tuple[Form, Form, Form]
    parted: Form


def _row(unit: UnitSpec) -> list[float]:
    """One layer as a row of numbers, in the order of `_content`."""
    units = (unit, unit.under_tp or unit)
    forms = [one.saved.get(mode, one.saved["none"]) for one in units for mode in RECOMPUTE] + [unit.parted_kept]
    numbers = [number for form in forms for number in (form.fixed, form.inner, form.residual, form.normed)]
    return [float(unit.parameters), float(unit.expert), float(unit.replicated), float(unit.frozen), *numbers]


@final
class StageTables:
    """What the ranks of every pipeline hold: sums over their layers, a row for each cut that was asked for."""

    def __init__(self, model: ModelSpec, by_cost: bool) -> None:
        rows = np.array([_row(unit) for unit in model.units] or [[0.0] * NUMBERS])
        per_layer = np.repeat(rows, [unit.count for unit in model.units] or [1], axis=0)
        ones = np.full((len(per_layer), 1), float(bool(model.units)))
        per_layer = np.hstack([ones, per_layer])
        self._sums = np.vstack([np.zeros(NUMBERS + 1), np.cumsum(per_layer, axis=0)])
        self._weighed = weights_of(model, by_cost)
        self._known: dict[tuple[int, Stage], Rows] = {}

    def rows(self, columns: Columns, stage: Stage) -> Rows:
        """(candidates, 1 + numbers of a layer): how many layers, then their sums; see `_row`.

        Args:
            columns: the candidates.
            stage: which rank of the pipeline; of the ranks in the middle, each number is that of the rank where it is
                the largest.
        """
        is_v = np.asarray(columns.schedule) == V_SHAPED
        keys = np.asarray(columns.pp) * KEY + np.asarray(columns.chunks) * 2 + (is_v & (np.asarray(columns.pp) > 1))
        unique, place = np.unique(keys, return_inverse=True)
        table = np.array([self._held(int(key), stage) for key in unique])
        found: Rows = table[place.reshape(np.shape(keys))]
        return found

    def _held(self, key: int, stage: Stage) -> Rows:
        if (key, stage) not in self._known:
            pp = key // KEY
            spans = spans_of_ranks(self._weighed, pp, key % KEY // 2, bool(key % 2))
            ranks = {"first": [0], "last": [pp - 1], "middle": list(range(1, pp - 1)) or [pp - 1]}
            chosen = [stage] if isinstance(stage, int) else ranks[stage]
            self._known[key, stage] = np.max([self._sum(spans[rank]) for rank in chosen], axis=0)
        return self._known[key, stage]

    def _sum(self, spans: Sequence[range]) -> Rows:
        total: Rows = sum((self._sums[one.stop] - self._sums[one.start] for one in spans), self._sums[0])
        return total


Weighed = tuple[tuple[tuple[int, int], ...], int | None]
"""Parameters of a layer and how many such layers follow each other, run by run; parameters of the head's product, or
None where layers are counted and not weighed."""


def weights_of(model: ModelSpec, by_cost: bool = True) -> Weighed:
    """What the cut of a model's layers depends on.

    Args:
        model: its layers and head.
        by_cost: as `Engine.cuts_by_cost`.
    """
    head = model.embedding_parameters if model.tied else model.head_parameters
    return tuple((unit.parameters, unit.count) for unit in model.units), head if by_cost else None


@lru_cache(maxsize=1024)
def spans_of_ranks(weighed: Weighed, pp: int, chunks: int, is_v: bool) -> tuple[tuple[range, ...], ...]:
    """For each rank the layers of its chunks.

    Args:
        weighed: of the model.
        pp: ranks of the pipeline.
        chunks: of a rank.
        is_v: the chunks run down and up again (zbv).
    """
    runs, head = weighed
    layers = [parameters for parameters, count in runs for _ in range(count)]
    if pp == 1 or not layers:
        return ((range(len(layers)),),) * pp
    num_stages = min(pp * chunks, len(layers))
    weights = weigh(layers, 0, head, tied=False) if head is not None else _counted(len(layers), num_stages)
    spans = weights.cut(num_stages)
    named = [stages_of(rank, pp, chunks, "zbv" if is_v else "") for rank in range(pp)]
    return tuple(tuple(spans[stage] for stage in mine if stage < len(spans)) for mine in named)


def _counted(num_layers: int, num_stages: int) -> StageWeights:
    """All layers alike; where they do not divide, embedding and head count as a layer each."""
    ends = float(num_layers % num_stages > 0)
    return StageWeights(layers=(1.0,) * num_layers, begin=ends, end=ends)


def content(rows: Rows) -> Content:
    """What each candidate's stage holds, from `StageTables.rows`."""
    layers, p, expert, replicated, frozen, *rest = np.moveaxis(rows, -1, 0)
    forms = [Form(*rest[4 * i : 4 * i + 4]) for i in range(7)]
    saved, under_tp = (forms[0], forms[1], forms[2]), (forms[3], forms[4], forms[5])
    return Content(layers, p, expert, replicated, frozen, saved, under_tp, forms[6])


def in_flight(columns: Columns, stage: Stage) -> Column:
    """Microbatches whose activations a stage keeps at once, in units of a whole stage.

        gpipe                    m
        1f1b                     pp - r
        interleaved (v chunks)   ((v - 1) pp + 2 (pp - r - 1) + 1) / v;  zero-bubble: pp
        zbv                      pp, and (m + r + 1) / 2 with few microbatches
        zb-1p                    pp;  zb-2p: 2 pp

    none more than m. Where backward passes come in two, from a forward pass to its pass of weights. r is 0, 1 and
    pp - 1 for the first stage, one in the middle and the last. What is played pass by pass (spec/pipeline_play.py) says
    the same for every rank (tests/cost/test_in_flight.py). Narayanan et al., arXiv
    2104.04473, section 2.2; Qi et al., arXiv 2401.10241 (B and W split) and 2405.15362 (V-shaped).
    """
    pp, v, m = columns.pp, columns.chunks, columns.num_microbatches
    kinds = {"first": pp - 1, "middle": np.maximum(pp - 2, 0), "last": pp * 0}
    behind = pp - 1 - stage if isinstance(stage, int) else kinds[stage]
    interleaved = ((v - 1) * pp + 2 * behind + 1) / np.maximum(v, 1)
    forms = {"gpipe": m, "1f1b": behind + 1, "zbv": np.minimum(pp, (m + pp - behind) / 2), "zb-1p": pp, "zb-2p": 2 * pp}
    forms |= {"interleaved1f1b": interleaved, "interleaved-zero-bubble": pp}
    copies = np.choose(columns.schedule, [np.broadcast_to(forms[name], np.shape(m * pp)) for name in SCHEDULES])
    return np.where(np.asarray(pp) > 1, np.minimum(copies, m), 1)


def played_in_flight(one: Candidate, rank: int, layers: Sequence[int]) -> tuple[float, float, float]:
    """The same for one rank of a pipeline whose chunks may have unlike numbers of layers: played pass by pass.

    With it, of these, what waits for its pass of weights alone; and how much less there is at the last stage's end.

    Args:
        one: with an interleaved schedule.
        rank: 0 .. pp - 1.
        layers: of the rank's chunks, in the order of its stages.
    """
    stages = stages_of(rank, one.pp, one.chunks, SCHEDULES[one.schedule])
    weight = dict(zip(stages, layers, strict=True))
    kept = waiting = 0
    most, at_the_loss, last = (0, 0), 0, one.pp * one.chunks - 1
    for each in passes_of(SCHEDULES[one.schedule], rank, one.pp, one.chunks, one.num_microbatches):
        kept += weight[each.stage] * ((each.kind == FORWARD) - (each.kind in (WEIGHT, WHOLE)))
        waiting += weight[each.stage] * ((each.kind == INPUT) - (each.kind == WEIGHT))
        if each.kind == FORWARD:
            most = max(most, (kept, waiting))
            at_the_loss = max(at_the_loss, kept * (each.stage == last))
    whole = max(sum(layers), 1)
    return most[0] / whole, most[1] / whole, (most[0] - (at_the_loss or most[0])) / whole


def form_of(value: Bytes) -> Form:
    """The same form for all candidates."""
    return Form(value.fixed, value.inner, value.residual, value.normed)
