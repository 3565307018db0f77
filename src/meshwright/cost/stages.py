"""What one pipeline stage holds: its layers, their parameters and bytes, and the microbatches in flight on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.candidate import RECOMPUTE, SCHEDULES, Column, Columns
from meshwright.spec.model_spec import Bytes, ModelSpec, UnitSpec

STAGES: Final = ("first", "middle", "last")
NUMBERS: Final = 4 + 4 * len(RECOMPUTE)
"""Of a layer, see `_row`."""

Rows = NDArray[np.float64]


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
    """

    layers: Column
    parameters: Column
    expert: Column
    replicated: Column
    frozen: Column
    saved: tuple[Form, Form, Form]


def _row(unit: UnitSpec) -> list[float]:
    """One layer as a row of numbers, in the order of `_content`."""
    forms = [unit.saved[mode] if mode in unit.saved else unit.saved["none"] for mode in RECOMPUTE]
    numbers = [number for form in forms for number in (form.fixed, form.inner, form.residual, form.normed)]
    return [float(unit.parameters), float(unit.expert), float(unit.replicated), float(unit.frozen), *numbers]


def stage_tables(model: ModelSpec) -> dict[str, Rows]:
    """For each kind of stage, what its n layers hold: (n_layers + 1, numbers of a layer), row n for n layers.

    A stage in the middle is any run of n layers: of each number the largest that some run has.
    """
    rows = np.array([_row(unit) for unit in model.units] or [[0.0] * NUMBERS])
    per_layer = np.repeat(rows, [unit.count for unit in model.units] or [1], axis=0)
    sums = np.vstack([np.zeros(NUMBERS), np.cumsum(per_layer, axis=0)])
    n = len(sums) - 1
    last = sums[n] - sums[::-1]
    if len(model.units) < 2:
        return {"first": sums, "middle": sums, "last": last}
    middle = np.stack([(sums[k:] - sums[: n + 1 - k]).max(axis=0) for k in range(n + 1)])
    return {"first": sums, "middle": middle, "last": last}


def is_even(model: ModelSpec, columns: Columns) -> NDArray[np.bool_]:
    """Do the layers divide over all chunks?"""
    return np.asarray(model.n_layers % np.asarray(columns.pp * columns.chunks) == 0)


def layers_of_stage(model: ModelSpec, columns: Columns, stage: str) -> NDArray[np.int64]:
    """Layers of a kind of stage, the fullest of its kind.

    Where the layers divide, all stages have as many. Else embedding and head count as a layer each, and what then is
    left goes to the stages in the middle (126 layers on 8 stages: 15, 16, ..., 16, 15).
    """
    v, n = columns.chunks, np.asarray(columns.pp * columns.chunks)
    base, rest = np.divmod(model.n_layers + 2, n)
    inner = base + (rest > 0)
    spilt = (rest > n - 2) * 1  # more than the chunks in the middle can take
    ends = {"first": base - 1, "last": base - 1 + spilt, "middle": inner}[stage]
    others = (v - 1) * inner
    if stage != "middle":  # a V-shaped schedule has both ends on the first rank, and none on the last
        is_v = np.asarray(columns.schedule) == SCHEDULES.index("zbv")
        ends = np.where(is_v, base - 1 if stage == "first" else inner, ends)
        others = np.where(is_v & (stage == "first"), base - 1 + spilt, others)
    uneven = np.where(n == 1, model.n_layers, np.minimum(ends + others, model.n_layers))
    even = model.n_layers // np.asarray(columns.pp)
    found: NDArray[np.int64] = np.maximum(np.where(is_even(model, columns), even, uneven), 0)
    return found


def content(table: Rows, layers: NDArray[Any]) -> Content:
    """Read a table of `stage_tables` for each candidate's number of layers."""
    rows = table[layers]
    p, expert, replicated, frozen, *rest = np.moveaxis(rows, -1, 0)
    forms = [Form(*rest[4 * i : 4 * i + 4]) for i in range(3)]
    return Content(layers, p, expert, replicated, frozen, (forms[0], forms[1], forms[2]))


def in_flight(columns: Columns, stage: str) -> Column:
    """Microbatches whose activations a stage keeps at once, in units of a whole stage.

        gpipe                    m
        1f1b                     pp - r
        interleaved (v chunks)   ((v - 1) pp + 2 (pp - r - 1) + 1) / v;  zero-bubble: the same
        zbv, zb-1p               pp;  zb-2p: 2 pp (they fill their limit on every stage)

    none more than m. r is 0, 1 and pp - 1 for the first stage, one in the middle and the last. Narayanan et al., arXiv
    2104.04473, section 2.2; Qi et al., arXiv 2401.10241 (B and W split) and 2405.15362 (V-shaped).
    """
    pp, v, m = columns.pp, columns.chunks, columns.num_microbatches
    behind = {"first": pp - 1, "middle": np.maximum(pp - 2, 0), "last": pp * 0}[stage]
    interleaved = ((v - 1) * pp + 2 * behind + 1) / np.maximum(v, 1)
    forms = {"gpipe": m, "1f1b": behind + 1, "zbv": pp, "zb-1p": pp, "zb-2p": 2 * pp}
    forms |= {"interleaved1f1b": interleaved, "interleaved-zero-bubble": interleaved}
    copies = np.choose(columns.schedule, [np.broadcast_to(forms[name], np.shape(m * pp)) for name in SCHEDULES])
    return np.where(np.asarray(pp) > 1, np.minimum(copies, m), 1)


def form_of(value: Bytes) -> Form:
    """The same form for all candidates."""
    return Form(value.fixed, value.inner, value.residual, value.normed)
