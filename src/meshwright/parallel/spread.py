"""What is asked of the parallel room besides the layout, and what is known of a model on its way through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from meshwright.models.built import Fill
from meshwright.models.casting import COMPUTE_DTYPES
from meshwright.parallel.homes import Homes
from meshwright.parallel.stages import Staged
from meshwright.parallel.tensor_loss import VocabularyPart
from meshwright.parallel.twins import Twin
from meshwright.parallel.units import Units
from meshwright.spec.tensor_rules import TensorRules


def _nobody(name: str) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What is asked of the parallel room, besides the layout.

    Attributes:
        recompute: none | selective | full.
        compute: fp32 | bf16 | fp16 | fp64.
        may_skip_parameters: some parameters may get no gradient in some steps.
        exact: sum gradients exactly.
        elementwise: the optimizer updates each weight from its own gradient and state alone.
        num_microbatches: of a step, all ranks together.
        units: patterns of the modules that ZeRO gathers one at a time; None for the repeated blocks.
        tensor: how tp cuts the model; None if it has one rank.
        loss_parallel: the loss takes logits that are cut over tp.
        schedule: of a pipeline.
        chunks: stages of a rank of it.
        entered: told the name of each unit of ZeRO as it is called.
        fill: gives each parameter its values once it has been cut; None if the model has them.
    """

    recompute: str
    compute: str
    may_skip_parameters: bool
    exact: bool = False
    elementwise: bool = True
    num_microbatches: int = 1
    units: Sequence[str] | None = None
    tensor: TensorRules | None = None
    loss_parallel: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    entered: Callable[[str], None] = _nobody
    fill: Fill | None = None

    @property
    def half(self) -> torch.dtype | None:
        """The type that weights are cast to; None where masters compute."""
        return COMPUTE_DTYPES[self.compute] if self.compute in ("bf16", "fp16") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """A model on its way: what tp and pp have left of it.

    Attributes:
        homes: where its tensors live.
        trained: names of all trained parameters of the whole model, sorted.
        uses: the most places that one parameter has.
        twins: tied parameters taken apart.
        staged: this rank's stages; None without a pipeline.
        units: what ZeRO gathers one at a time; None without it, or with a pipeline.
        vocabulary: which logits its head gives; None for all.
    """

    homes: Homes
    trained: Sequence[str]
    uses: int
    twins: Sequence[Twin] = ()
    staged: Staged | None = None
    units: Units | None = None
    vocabulary: VocabularyPart | None = None
