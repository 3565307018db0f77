"""Counts of a loss with several pairs, before the first backward of the step.

One pair is simple: its gradient is divided at the end of the step. With several, each has its own divisor, and
gradients of different pairs cannot be told apart once they are added. So the counts of the whole step come first: from
`loss.counts(batch)` if the loss function has that attribute; from the forward pass itself if there is one microbatch a
rank; else from a forward pass without gradients over the rank's microbatches, which costs about a third of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn

from meshwright.train.loader import Microbatch, to_device
from meshwright.train.loss import Pair

if TYPE_CHECKING:
    from meshwright.train.step import Stepper

Weights = list[torch.Tensor | None]
"""What each pair's sum is multiplied by before backward; [None] for one pair, divided at the end of the step."""


def counts_first(stepper: Stepper, mine: list[Microbatch], pairs: list[Pair] | None = None) -> Weights:
    """Weights of the step, or an empty list if they are not known yet.

    Args:
        stepper: whose loss function it is.
        mine: this rank's microbatches of the step.
        pairs: what the forward pass of the first microbatch gave; None before it.
    """
    counts = getattr(stepper.loss, "counts", None)
    if callable(counts):
        found = [(m, counts(to_device(m.batch, stepper.mesh.device))) for m in mine]
        return _weights(stepper, [[_scalar(stepper, n if len(m.ids) else 0.0) for n in row] for m, row in found])
    if pairs is None:
        return []
    if len(pairs) == 1:
        return [None]
    rows = [[_scalar(stepper, pair.count) for pair in pairs]]
    with torch.no_grad(), _buffers_kept(stepper.parallel.bare):
        rows += [[_scalar(stepper, p.count) for p in stepper.forward(m, reduce=False)] for m in mine[1:]]
    stepper.seeds.at(mine[0].step, mine[0].index)
    stepper.parallel.set_sync(mine[0].last)
    return _weights(stepper, rows)


def _scalar(stepper: Stepper, count: Any) -> torch.Tensor:
    return torch.as_tensor(count, dtype=torch.float64, device=stepper.mesh.device).reshape(())


def _weights(stepper: Stepper, rows: list[list[torch.Tensor]]) -> Weights:
    counts = torch.stack([torch.stack(row) for row in rows]).sum(0)  # (pairs,)
    if stepper.mesh.layout.dp_degree > 1:
        dist.all_reduce(counts)
    return [None] if len(counts) == 1 else list(1.0 / counts.clamp(min=1.0))


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put buffers back afterwards: batch norm must not see a microbatch twice."""
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    for buffer, before in saved:
        buffer.copy_(before)
