"""The fitted numbers computed again from their rows, so that published/fits.py cannot drift from the formulas."""

from __future__ import annotations

import statistics

from meshwright.cost.memory import estimate, outside_bytes
from meshwright.cost.quantities import StageQuantities
from meshwright.cost.terms import gradient_bytes, optimizer_bytes, parameter_bytes
from published.fits import FIT_ROWS
from published.programs import Setting, setting_of
from published.rows import GIB, Row, read_rows


def fitted_again() -> dict[str, float]:
    """Each fitted number by its name."""
    rows = {row.id: row for row in read_rows()}
    found = {name: [setting_of(rows[row_id]) for row_id in ids] for name, ids in FIT_ROWS.items()}
    return {
        "torchtitan allocator": statistics.mean(allocator_of(one) for one in found["torchtitan allocator"]),
        "megatron workspace, GiB": statistics.mean(workspace_gib(one) for one in found["megatron workspace, GiB"]),
        "deepspeed allocator": statistics.mean(allocator_of(one) for one in found["deepspeed allocator"]),
        "internevo step, bytes": statistics.mean(step_bytes(one) for one in found["internevo step, bytes"]),
    }


def allocator_of(setting: Setting) -> float:
    """Measured over what the formulas say is allocated or cached; a driver's view has the context taken off."""
    found = estimate(setting.job, setting.candidate, setting.stages)
    outside = float(outside_bytes(setting.job, setting.candidate))
    held = (float(found.total_bytes[0]) - outside) / setting.job.engine.allocator_low
    measured = _measured(setting.row) - (outside if setting.figure == "device" else 0.0)
    return measured / held


def workspace_gib(setting: Setting) -> float:
    """What measured persistent memory has beyond parameters, gradients and optimizer state."""
    stage = (setting.stages or ("first",))[0]
    q = StageQuantities(setting.job, setting.candidate, stage)
    states = float(parameter_bytes(q) + gradient_bytes(q) + optimizer_bytes(q))
    return (setting.row.measured_states_gib or 0.0) - states / GIB


def step_bytes(setting: Setting) -> float:
    """Bytes per parameter of this rank's part that the figure has beyond states and what is outside the allocator."""
    q = StageQuantities(setting.job, setting.candidate, (setting.stages or ("first",))[0])
    states = float(parameter_bytes(q) + gradient_bytes(q) + optimizer_bytes(q))
    outside = float(outside_bytes(setting.job, setting.candidate)) + setting.job.engine.workspace_bytes
    return (_measured(setting.row) - states - outside) / float(q.cut(trained_only=True))


def _measured(row: Row) -> float:
    return (row.measured_gib or 0.0) * GIB
