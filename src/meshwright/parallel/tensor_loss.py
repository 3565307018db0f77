"""Token cross-entropy of logits whose vocabulary is cut over ranks: no rank ever has a whole row of logits.

torch.distributed.tensor.parallel.loss_parallel computes the same and does not serve here: backward must run inside its
context, and backward is the step's or the pipeline's, far from the loss; and it takes DTensors, which the outputs of a
pipeline stage cannot be. The formula is that of Megatron-LM (arXiv 1909.08053, section 3): the greatest logit over the
ranks, then in one sum the exponentials and the label's logit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.parallel.tensor_moves import TensorAxis, reduced


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The rows of the vocabulary whose logits a rank has.

    Attributes:
        axis: the ranks over which the vocabulary is cut.
        start: first of this rank's rows.
        stop: one past the last; `start` if it has none.
        size: rows of the whole vocabulary.
    """

    axis: TensorAxis
    start: int
    stop: int
    size: int


def here_or_none(ids: Tensor, start: int, stop: int, size: int) -> tuple[Tensor, Tensor]:
    """Ids as indices into this rank's rows, and where they are not among them.

    An id elsewhere becomes index 0. One outside the whole vocabulary becomes an index past the rows, so that looking it
    up fails as it does on one process, and no flag has to be read back from the device.
    """
    elsewhere = (ids < start) | (ids >= stop)
    outside = (ids < 0) | (ids >= size)
    return torch.where(outside, stop - start, torch.where(elsewhere, 0, ids - start)), elsewhere


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor, part: VocabularyPart, ignore_index: int) -> Tensor:
    """Sum of the cross-entropy over the labels, the same scalar on every rank.

    Args:
        logits: (n, stop - start), this rank's, fp32 or fp64.
        labels: (n,) int64, ids of the whole vocabulary.
        part: which rows those are.
        ignore_index: label that counts for nothing.
    """
    total: Tensor = _CrossEntropy.apply(logits, labels, part, ignore_index)  # type: ignore[no-untyped-call]
    return total


@final
class _CrossEntropy(torch.autograd.Function):
    """log(sum exp(logits)) - logits[label], summed; its gradient is softmax(logits) - onehot(label), part by part."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, part: VocabularyPart, ignored: int) -> Tensor:
        """Two all-reduces of a row's scalars: the greatest logit, then both sums at once."""
        skipped = labels == ignored
        index, elsewhere = here_or_none(labels.masked_fill(skipped, part.start), part.start, part.stop, part.size)
        elsewhere |= skipped
        shifted = logits - reduced(_greatest(logits), part.axis, "max")[:, None]
        of_label = _at(shifted, index, elsewhere)
        exponentials = shifted.exp_()
        sums, of_label = reduced(torch.stack((exponentials.sum(1), of_label)), part.axis).unbind()
        ctx.save_for_backward(exponentials.div_(sums[:, None]), index, elsewhere, skipped)
        return (sums.log() - of_label).masked_fill_(skipped, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """No collective: every rank has its part of the softmax."""
        softmax, index, elsewhere, skipped = ctx.saved_tensors
        result = softmax * (gradient * ~skipped)[:, None]
        if softmax.size(1):
            result.scatter_add_(1, index[:, None], -(gradient * ~elsewhere)[:, None])
        return result, None, None, None


def _greatest(logits: Tensor) -> Tensor:
    """Of each row; a rank without rows of the vocabulary has minus infinity."""
    return logits.amax(1) if logits.size(1) else logits.new_full((len(logits),), float("-inf"))


def _at(logits: Tensor, index: Tensor, elsewhere: Tensor) -> Tensor:
    """Each row's logit at its index; 0 where it is another rank's."""
    if not logits.size(1):
        return logits.new_zeros(len(logits))
    return logits.gather(1, index[:, None])[:, 0].masked_fill(elsewhere, 0.0)
