"""Counts of a loss with several pairs, before the first backward of the step.

One pair is simple: its gradient is divided at the end of the step. With several, each has its own divisor, and
gradients of different pairs cannot be told apart once they are added. So the counts of the whole step come first: from
`loss.counts(batch)` if the loss function has that attribute; from the forward pass itself if there is one microbatch a
rank; else from a forward pass without gradients over the rank's microbatches, which costs about a third of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from meshwright.errors import SpecError
from meshwright.train.buffers import KeptBuffers
from meshwright.train.loader import Microbatch, to_device
from meshwright.train.loss import Pair, divisor

if TYPE_CHECKING:
    from meshwright.train.step import Stepper

Weights = list[torch.Tensor | None]
"""What each pair's sum is multiplied by before backward; [None] for one pair, divided at the end of the step."""

SAME_COUNT: Final = 1e-6
"""Counts are sums of whole numbers mostly, but weights of samples may be counted too, in fp32."""


def counts_first(stepper: Stepper, mine: list[Microbatch], pairs: list[Pair] | None = None) -> Weights:
    """Weights of the step, or an empty list if they are not known yet.

    Args:
        stepper: whose loss function it is.
        mine: this rank's microbatches of the step.
        pairs: what the forward pass of the first microbatch gave; None before it.

    Raises:
        SpecError: the loss function's `counts` gives no list of numbers.
    """
    if callable(getattr(stepper.loss, "counts", None)):
        return _weights(stepper, [_said(stepper, microbatch) for microbatch in mine])
    if stepper.parallel.pipeline is not None:
        return [None]  # the last stage finds out, and refuses more
    if pairs is None:
        return []
    if len(pairs) == 1:
        return [None]
    rows = [[_scalar(stepper, pair.count) for pair in pairs]]
    before = KeptBuffers(stepper.parallel.bare)  # batch norm must not see a microbatch twice
    with torch.no_grad():
        rows += [[_scalar(stepper, p.count) for p in stepper.forward(m, reduce=False)] for m in mine[1:]]
    before.put_back()
    stepper.seeds.at(mine[0].step, mine[0].index)
    stepper.parallel.announce(stepper.reduces(mine[0]), mine[0].last)
    return _weights(stepper, rows)


def _said(stepper: Stepper, microbatch: Microbatch) -> list[torch.Tensor]:
    """What `loss.counts` says of a microbatch; a stand-in has none."""
    counts = stepper.loss.counts(to_device(microbatch.batch, stepper.mesh.device))  # type: ignore[attr-defined]
    try:
        return [_scalar(stepper, count if len(microbatch.ids) else 0.0) for count in counts]
    except (TypeError, ValueError, RuntimeError) as error:
        rule = f"returned a {type(counts).__name__}; it must return a list of numbers, one count for each pair."
        raise SpecError("counts of the loss function", rule) from error


def _scalar(stepper: Stepper, count: Any) -> torch.Tensor:
    return torch.as_tensor(count, dtype=torch.float64, device=stepper.mesh.device).reshape(())


def _weights(stepper: Stepper, rows: list[list[torch.Tensor]]) -> Weights:
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise SpecError("the loss function", f"returned {lengths[0]} and {lengths[1]} pairs in one step.")
    counts = torch.stack([torch.stack(row) for row in rows]).sum(0)  # (pairs,)
    if stepper.mesh.layout.dp_degree > 1:
        dist.all_reduce(counts, group=stepper.mesh.groups.dp)
    return [None] if len(counts) == 1 else list(1.0 / torch.where(counts > 0, counts, 1.0))


def require_counts(counts: list[float], weights: list[float | None]) -> None:
    """Refuse counts that are none, or other ones than the pairs were weighted by.

    Args:
        counts: of each pair, over the whole step.
        weights: what the pairs' sums were multiplied by; None where that is to come.

    Raises:
        SpecError: naming the pair.
    """
    for i, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        if count < 0:
            raise SpecError("the loss function", f"counted {count:g} for pair {i} in one step; at least 0 can be.")
        if weight is not None and abs(weight * divisor(count) - 1.0) > SAME_COUNT:
            rule = f"said {1 / weight:g} of pair {i} before the step, and {count:g} came with its sums."
            raise SpecError("the loss function", rule, "`loss.counts` and the pairs must count the same.")
