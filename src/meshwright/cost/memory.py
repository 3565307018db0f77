"""Memory of one rank, moment by moment, for one candidate or for columns of many. The peak is the fullest moment.

    forward        the last block's forward pass: all that the blocks keep is there
    logits         logits and cross-entropy, before backward
    loss           the same, as backward begins
    backward       the last block's backward pass, with what it computes again
    backward_end   the first block's: nearly all gradients are there
    reduction      the gradients of what is in no block, which ZeRO reduces last
    update         clipping and the optimizer

At each moment the same terms, so that an explanation is those terms printed. Gathered parameters, buffers and the loss
come and go; parameters, gradients and optimizer state stay, and are counted at their full size at every moment, as the
allocator keeps their room (`transient = True` counts gradients only where they really live).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.candidate import Column, Columns
from meshwright.cost.quantities import Job, StageQuantities
from meshwright.cost.stages import Stage
from meshwright.cost.terms import MOMENTS, moment_terms
from meshwright.spec.model_spec import Bytes

YES_SHARE: Final = 0.9
"""Up to this share of a device a candidate fits; above it is tight. Fujii et al. (arXiv 2411.06465) found no run out of
memory whose plain estimate was below 0.8 of the device; the estimate here has the allocator's share in it."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of many candidates, a number for each.

    Attributes:
        allocated_bytes: at its fullest moment, what the program asks for.
        total_bytes: with the allocator's usual share, the device's context and communicators.
        reserved_bytes: the same with a fragmented allocator; verdicts are made on it.
        moment: index into MOMENTS.
        stage: index into the stages looked at: 0 first, 1 last, 2 in the middle.
        fits: 2 yes, 1 tight, 0 no.
    """

    allocated_bytes: NDArray[np.float64]
    total_bytes: NDArray[np.float64]
    reserved_bytes: NDArray[np.float64]
    moment: NDArray[np.int64]
    stage: NDArray[np.int64]
    fits: NDArray[np.int64]

    def at(self, place: int) -> Memory:
        """That of one candidate."""
        return Memory(*(getattr(self, one.name)[place : place + 1] for one in fields(self)))


def stages_of(job: Job, columns: Columns) -> tuple[str, ...]:
    """The kinds of stage that can be the fullest."""
    if np.all(np.asarray(columns.pp) == 1):
        return ("first",)
    return ("first", "last") if np.all(np.asarray(columns.pp) <= 2) else ("first", "last", "middle")


def estimate(job: Job, columns: Columns, stages: Sequence[Stage] | None = None) -> Memory:
    """Price candidates.

    Args:
        job: what is trained, and by which program.
        columns: the candidates.
        stages: of a pipeline, that are looked at; None for all that can be the fullest.
    """
    n = len(columns)
    sums, cached = [], []
    for stage in stages or stages_of(job, columns):
        q = StageQuantities(job, columns, stage)
        terms, idle = moment_terms(q), cached_bytes(q)
        exists = (np.asarray(columns.pp) > 2) | (stage != "middle")
        sums += [np.broadcast_to(sum(terms[moment].values()) * exists, (n,)) for moment in MOMENTS]
        cached += [np.broadcast_to(idle[moment] * exists, (n,)) for moment in MOMENTS]
    table = np.stack(sums) + job.engine.workspace_bytes  # (stages x moments, candidates)
    held = table + np.stack(cached)
    best, rows = held.argmax(axis=0), np.arange(n)
    outside = np.broadcast_to(outside_bytes(job, columns), (n,))
    total = held[best, rows] * job.engine.allocator_low + outside
    reserved = held[best, rows] * job.engine.allocator_high + outside
    return Memory(
        table.max(axis=0),
        total,
        reserved,
        best % len(MOMENTS),
        best // len(MOMENTS),
        verdict(reserved, job.capacity_bytes),
    )


def cached_bytes(q: StageQuantities) -> dict[str, Column]:
    """What the allocator holds and cannot use again: blocks too small for what is asked for at the loss."""
    engine, model = q.job.engine, q.job.model
    logits = q.bytes_of(Bytes(inner=engine.loss_cached_bytes * model.vocab_size)) * q.has_last
    transient = q.transient if engine.caches_transient else 0.0
    none = 0.0 * (logits + transient)
    return dict.fromkeys(MOMENTS, none) | {"loss": logits + transient * q.has_last}


def verdict(reserved_bytes: Column, capacity_bytes: int) -> Any:
    """2 yes, 1 tight, 0 no."""
    return (reserved_bytes <= YES_SHARE * capacity_bytes) * 1 + (reserved_bytes <= capacity_bytes) * 1


def outside_bytes(job: Job, columns: Columns) -> Column:
    """What the device holds outside the allocator: its context, and buffers of each communicator."""
    engine, groups = job.engine, communicators(columns)
    return engine.context_bytes + engine.communicator_bytes * groups


def communicators(columns: Columns) -> Column:
    """Groups of more than one rank that a rank belongs to."""
    axes = (columns.dp_replicate, columns.dp_shard, columns.tp, columns.pp, columns.cp, columns.ep)
    return sum((np.asarray(axis) > 1) * 1 for axis in axes)
