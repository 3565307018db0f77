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
from meshwright.train.piped import first_bad_of_pipeline

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
        found = seen.gradients.bad_microbatch
        bad, what = found if found is not None else _bad_gradient(stepper, mine, weights), "the gradient"
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
    return f"rank {stepper.mesh.layout.last_rank_of(owner)}, microbatch {index}"


def _bad_gradient(stepper: Stepper, mine: list[Microbatch], weights: Weights | None) -> int | None:
    """Run the step's microbatches again, one at a time, and find the first with a bad gradient.

    It costs a step, once, in a run that is about to stop or to skip. Every rank runs all of its own: the others may
    need it in a collective.
    """
    first, gradients = float("inf"), stepper.gradients
    if weights is not None:
        gradients.watch()
        if stepper.parallel.pipeline is not None:
            first = first_bad_of_pipeline(stepper, mine)
            mine = []
        for microbatch in mine:
            gradients.drop()
            pairs = stepper.forward(microbatch, reduce=gradients.replays_reduced)
            stepper.backward(stepper.empty_sums(), microbatch, pairs, weights)
            if math.isinf(first) and not gradients.finite():
                first = float(microbatch.index)
        stepper.parallel.settle()
    found = torch.tensor(first, dtype=torch.float64, device=stepper.mesh.device)
    if not stepper.mesh.is_alone:
        dist.all_reduce(found, dist.ReduceOp.MIN)
    index = found.item()
    return int(index) if math.isfinite(index) else None
