"""Loss as contract 3 has it: pairs of a sum and a count, each divided once by its own count over the whole step.

A mean of means weighs a microbatch of 1 label as much as one of 1000; a sum and a count never do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn as nn
import torch.nn.functional as F

from meshwright.errors import SpecError
from meshwright.parallel.tensor_loss import VocabularyPart, vocabulary_cross_entropy
from meshwright.train.corpus import IGNORED
from meshwright.train.loader import Batch

LossFunction = Callable[[nn.Module, Batch], Any]
"""f(model, batch) -> (sum, count), a list of such pairs, or (weighted by what the batch counts) a mean."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One term of the loss in one microbatch.

    Attributes:
        total: scalar, attached to the graph.
        count: what the sum is divided by once it is summed over the step.
    """

    total: torch.Tensor
    count: torch.Tensor | float


def token_cross_entropy(
    model: nn.Module, batch: Batch, *, part: VocabularyPart | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy summed over the label tokens, and their number; labels of -100 count for nothing.

    Args:
        model: tokens (b, s) -> logits (b, s, v), or an output that has them as `.logits`.
        batch: `tokens` and `labels`, each (b, s) int64.
        part: which logits the model gives on this rank, where tensor parallelism leaves them cut; None for all.
    """
    tokens, labels = _tokens_and_labels(batch)
    return cross_entropy_of(model(tokens), labels, part=part)


def cross_entropy_of(
    out: Any, labels: torch.Tensor, *, part: VocabularyPart | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of what the model returned, `out`."""
    logits = out.logits if hasattr(out, "logits") else out
    # fp32 for the sum over the vocabulary and the tokens; fp64 stays fp64
    logits = logits.flatten(0, 1) if logits.dtype == torch.float64 else logits.flatten(0, 1).float()
    if part is None:
        total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    else:
        total = vocabulary_cross_entropy(logits, labels.flatten(), part, IGNORED)
    return total, (labels != IGNORED).sum()


def _tokens_and_labels(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(batch, dict) and "tokens" in batch and "labels" in batch:
        return batch["tokens"], batch["labels"]
    got = f"keys {', '.join(map(str, batch))}" if isinstance(batch, dict) else f"a {type(batch).__name__}"
    raise SpecError(
        "the default loss (token cross-entropy)",
        f"needs batches with `tokens` and `labels`; the data set gives {got}.",
        'Name your own: loss.build = "package.module:function", f(model, batch) -> (sum, count).',
    )


def divisor(count: float) -> float:
    """What a sum is divided by; where nothing was counted the sum is 0, and stays it."""
    return count if count > 0 else 1.0


def pairs_of(result: Any, batch: Batch, warn: Callable[[str], None]) -> list[Pair]:
    """What a loss function returned, as pairs.

    Args:
        result: of the loss function.
        batch: what it was given.
        warn: told where the count of a bare mean had to be guessed.

    Raises:
        SpecError: it is no pair, list of pairs or scalar.
    """
    if isinstance(result, torch.Tensor) and result.ndim == 0 and result.is_floating_point():
        return [_weighted_mean(result, batch, warn)]
    if isinstance(result, tuple) and len(result) == 2 and is_pair(result):
        return [Pair(*result)]
    if isinstance(result, list | tuple) and result and all(is_pair(item) for item in result):
        return [Pair(*item) for item in result]
    raise SpecError(
        "the loss function",
        f"returned {described(result)}; it must return (sum, count), or a list of such pairs.",
        "Sum over the samples or label tokens of the microbatch, and return how many there were.",
    )


def is_pair(item: Any) -> bool:
    """Is this a scalar sum and a count?"""
    if not isinstance(item, list | tuple) or len(item) != 2:
        return False
    total, count = item
    is_scalar = isinstance(total, torch.Tensor) and total.numel() == 1 and total.is_floating_point()
    return is_scalar and (isinstance(count, int | float) or _is_count(count))


def _is_count(count: Any) -> bool:
    """A count that depends on the weights is none: two losses were returned for a sum and a count."""
    return isinstance(count, torch.Tensor) and count.numel() == 1 and not count.requires_grad


def described(result: Any) -> str:
    """What a loss function returned, in words."""
    if isinstance(result, torch.Tensor):
        kind = str(result.dtype).removeprefix("torch.")
        return f"a {kind} tensor of shape {tuple(result.shape)}"
    if isinstance(result, Sequence) and not isinstance(result, str):
        return f"a {type(result).__name__} of {', '.join(map(_describe_part, result)) or 'nothing'}"
    return f"a {type(result).__name__}"


def _describe_part(part: Any) -> str:
    return "Tensor with a gradient" if isinstance(part, torch.Tensor) and part.requires_grad else type(part).__name__


def _weighted_mean(mean: torch.Tensor, batch: Batch, warn: Callable[[str], None]) -> Pair:
    """A bare mean is weighted by the labels that count; where the batch does not say how many, by its rows."""
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
        warn(_GUESS.format("labels that are not -100"))
        count = (labels != IGNORED).sum()
        return Pair(torch.where(count > 0, mean, mean.new_zeros(())) * count, count)
    warn(_GUESS.format("rows"))
    rows = _rows(batch)
    return Pair(mean * rows, float(rows))


_GUESS: Final = (
    "the loss function returns one number. It is taken for a mean over the {0} of a microbatch, and weighed by how "
    "many there are. If it is a mean over anything else, microbatches are weighed wrongly: return (sum, count)."
)


def _rows(batch: Batch) -> int:
    if isinstance(batch, torch.Tensor) and batch.ndim:
        return len(batch)
    items = list(batch.values()) if isinstance(batch, dict) else list(batch) if isinstance(batch, list | tuple) else []
    for item in items:
        if isinstance(item, torch.Tensor | dict | list | tuple):
            return _rows(item)
    raise SpecError(
        "the loss function",
        "returned one number, and its batch does not say how many rows it has.",
        "Return (sum, count).",
    )
