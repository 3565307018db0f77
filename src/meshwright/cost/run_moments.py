"""What a run of meshwright's own should measure: the same terms at the moments of `spec.moments`.

An estimate for a choice counts gradients at their full size at every moment; here they are counted where they live.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from meshwright.cost.candidate import Candidate, Column
from meshwright.cost.quantities import Job, StageQuantities
from meshwright.cost.terms import has_buckets, moment_terms
from meshwright.spec.moments import AFTER, BACKWARD, BEFORE, BUFFERS, FORWARD, MOMENTS, UPDATE

SEEN_AT: Final[Mapping[str, tuple[str, ...]]] = {
    FORWARD: ("forward", "logits"),
    BACKWARD: ("loss", "backward", "backward_end", "reduction"),
    UPDATE: ("update",),
}
"""Which of the memory model's moments lie within each that is measured."""

IN_A_PIPELINE: Final = {**SEEN_AT, BACKWARD: ("loss", "backward", "backward_end"), UPDATE: ("reduction", "update")}
"""There gradients are reduced when the schedule is over."""


def run_moments(job: Job, candidate: Candidate, rank: int | None = None) -> dict[str, dict[str, int]]:
    """Bytes by moment and term.

    Args:
        job: with the engine of the device that it runs on.
        candidate: one layout with its knobs.
        rank: of the pipeline, 0 .. pp - 1; None for the fullest at each moment.
    """
    found: dict[str, dict[str, int]] = {}
    for stage in range(candidate.pp) if rank is None else (rank,):
        q = StageQuantities(job, candidate, stage)
        terms = {moment: _whole(row) for moment, row in moment_terms(q, transient=True).items()}
        seen_at = SEEN_AT if candidate.pp == 1 else IN_A_PIPELINE
        rows = {seen: max((terms[moment] for moment in among), key=_sum) for seen, among in seen_at.items()}
        rows[BEFORE] = rows[AFTER] = _between(q, terms["update"])
        for moment in MOMENTS:
            row = rows[moment] | {BUFFERS: job.model.buffers}
            if moment not in found or _sum(row) > _sum(found[moment]):
                found[moment] = row
    return found


def _between(q: StageQuantities, update: Mapping[str, int]) -> dict[str, int]:
    """Between steps there are weights and optimizer state, and the buckets of DDP, which hold its gradients."""
    lasting = ("parameters", "optimizer_state", *(("activations",) if q.columns.pp > 1 else ()))  # receive buffers
    return {name: update[name] for name in lasting} | {"gradients": update["gradients"] if has_buckets(q) else 0}


def _whole(row: Mapping[str, Column]) -> dict[str, int]:
    return {name: round(float(np.max(amount))) for name, amount in row.items()}


def _sum(row: Mapping[str, int]) -> int:
    return sum(row.values())
