"""The one door through which a step enters the model, whatever wraps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn as nn

from meshwright.parallel.gradients import Gradients
from meshwright.parallel.homes import Homes
from meshwright.parallel.pipeline import Pipeline
from meshwright.parallel.tensor_loss import VocabularyPart
from meshwright.parallel.twins import Twin


@final
class Entry(nn.Module):
    """Calls any function of the model as one forward pass.

    The function may call the model several times, or its methods, and still be one forward pass; and the model keeps
    its class, attributes and parameter names.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call function(model, ...) as one forward pass."""
        return function(self.model, *args, **kwargs)


def _as_it_is(objective: torch.Tensor) -> torch.Tensor:
    return objective


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spreading:
    """What is known of a model's tensors once it is spread.

    Attributes:
        homes: where each tensor lives.
        twins: tied parameters that were taken apart.
        vocabulary: which logits the head gives on this rank, where they stay cut; None for all.
        received: what a pipeline keeps to receive in.
    """

    homes: Homes
    twins: Sequence[Twin] = ()
    vocabulary: VocabularyPart | None = None
    received: Callable[[], list[torch.Tensor]] = list

    def refresh(self) -> None:
        """After an update, or after values were loaded: what stands for a tied parameter takes over its values."""
        for twin in self.twins:
            twin.follow()


@dataclass(frozen=True, slots=True)
class Parallel:
    """A model that has been spread over the mesh.

    A step calls, for each microbatch, `announce`, `entry`, `before_backward` and backward, and after the last `settle`.

    Attributes:
        bare: the user's module; its parameter names are those of checkpoints.
        entry: call it as entry(function, *args): function(bare, *args) as one forward pass.
        gradients: what the backward passes leave, and the optimizer gets.
        announce: announce(reduce, last): whether the next forward and backward reduces gradients over the ranks, and
            whether it is the step's last. Before passes without a backward: announce(False, False).
        before_backward: give it what backward starts from, and start from what it returns.
        settle: give the weights their own type back; the step's forward and backward passes are over.
        notes: lines for the user about how it was spread.
        spreading: where its tensors live.
        pipeline: what runs its stages; None if there is one stage, and passes go through `entry`.
        require_same: refuse to trust forward passes without a backward if ranks called other modules; collective.
    """

    bare: nn.Module
    entry: nn.Module
    gradients: Gradients
    announce: Callable[[bool, bool], None]
    before_backward: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
    settle: Callable[[], None] = _nothing
    notes: tuple[str, ...] = ()
    spreading: Spreading | None = None
    pipeline: Pipeline | None = None
    require_same: Callable[[], None] = _nothing
