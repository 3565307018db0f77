"""What happens when a loss or the gradient norm is NaN or infinite: one decision on all ranks, and one place named."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from meshwright.errors import NonFiniteError
from meshwright.spec.batch import microbatches_of_rank
from meshwright.train.counts import Weights
from meshwright.train.loader import Microbatch

if TYPE_CHECKING:
    from meshwright.train.step import Stepper
    from meshwright.train.sums import Seen


def refuse_nonfinite(
    stepper: Stepper, mine: list[Microbatch], seen: Seen, loss: float, norm: float, weights: Weights | None
) -> str:
    """Stop, or say why the step is skipped.

    Args:
        stepper: the step's owner.
        mine: this rank's microbatches.
        seen: what the step read; equal on all ranks.
        loss: the step's loss.
        norm: the gradients' norm.
        weights: what the pairs were weighted by; None if the microbatches cannot be run again.

    Raises:
        NonFiniteError: the rule is to stop.
    """
    step = mine[0].step + 1
    if any(seen.flags):
        bad, what = next(i for i, flag in enumerate(seen.flags) if flag), "the loss"
    elif not math.isfinite(loss):
        bad, what = None, "the sum of the losses"
    else:
        bad, what = _bad_gradient(stepper, mine, weights), "the gradient"
    where = "no microbatch by itself was found to be" if bad is None else _place(stepper, seen.samples, bad)
    rule = f"{what} is not finite ({where}); loss {loss:g}, gradient norm {norm:g}"
    if stepper.rules.on_nonfinite == "skip":
        return rule
    raise NonFiniteError(
        f"step {step}",
        f"{rule}.",
        'No weight was changed by this step. train.on_nonfinite = "skip" passes such steps by.',
    )


def _place(stepper: Stepper, samples: int, index: int) -> str:
    degree = stepper.mesh.layout.dp_degree
    total = -(-samples // stepper.rules.batch.microbatch_size)  # fewer in the last step of an epoch
    owner = next((r for r in range(degree) if index in microbatches_of_rank(total, degree, r)), degree - 1)
    return f"rank {owner}, microbatch {index}"


def _bad_gradient(stepper: Stepper, mine: list[Microbatch], weights: Weights | None) -> int | None:
    """Run the step's microbatches again, one at a time and unreduced, and find the first with a bad gradient.

    It costs a step, once, in a run that is about to stop or to skip. Where gradients are summed over ranks inside
    every backward a rank's own part cannot be seen, and None is returned.
    """
    first = float("inf")
    if stepper.parallel.local_gradients and weights is not None:
        for microbatch in mine:
            stepper.drop_gradients()
            pairs = stepper.forward(microbatch, reduce=False)
            stepper.backward(stepper.empty_sums(), microbatch, pairs, weights)
            if not all(bool(torch.isfinite(gradient).all()) for gradient in stepper.gradients()):
                first = float(microbatch.index)
                break
        stepper.parallel.settle()
    found = torch.tensor(first, dtype=torch.float64, device=stepper.mesh.device)
    if stepper.mesh.layout.dp_degree > 1:
        dist.all_reduce(found, dist.ReduceOp.MIN)
    index = found.item()
    return int(index) if math.isfinite(index) else None
