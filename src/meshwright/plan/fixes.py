"""What would make a candidate fit that does not: the fitting one that differs least."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.candidate import RECOMPUTE, Candidate, Columns
from meshwright.plan.option import Option
from meshwright.plan.search import Found, is_planned


def nearest_fitting(found: Found, one: Candidate) -> int | None:
    """The place of the fitting candidate that changes the fewest things; among those the best by order.

    What is planned counts only where nothing else fits.

    Args:
        found: the search.
        one: what does not fit.
    """
    fitting = found.memory.fits > 0
    if not fitting.any():
        return None
    unplanned = fitting & ~is_planned(found.columns)
    fitting = unplanned if unplanned.any() else fitting
    away = np.where(fitting, distance(found.columns, one), np.inf)
    return found.first(away == away.min())


def distance(columns: Columns, one: Candidate) -> NDArray[np.int64]:
    """How much differs: 3 for each axis, 2 for the ZeRO stage and each knob, 1 for the microbatch."""
    c = columns
    weights = {"tp": 3, "pp": 3, "cp": 3, "ep": 3, "zero_stage": 2, "recompute": 2, "offload": 2, "schedule": 2}
    away = np.zeros(len(c), np.int64)
    for name, weight in (weights | {"microbatch_size": 1}).items():
        away += weight * (np.asarray(getattr(c, name)) != getattr(one, name))
    if one.dp_shard > 1:
        away += 3 * ((np.asarray(c.dp_replicate) > 1) != (one.dp_replicate > 1))
    return away


def change(one: Option, other: Option) -> str:
    """The second as seen from the first: another layout whole, of the same layout what differs."""
    mine, theirs = one.candidate, other.candidate
    size = f"microbatch_size {theirs.microbatch_size}" if theirs.microbatch_size != mine.microbatch_size else ""
    if mine.word != theirs.word:
        return ", ".join(part for part in (other.phrase, size) if part)
    redo = f"{RECOMPUTE[theirs.recompute]} recompute" if theirs.recompute != mine.recompute else ""
    moved = "offloaded optimizer state" if theirs.offload > mine.offload else ""
    return ", ".join(part for part in (redo, moved, size) if part) or other.phrase
