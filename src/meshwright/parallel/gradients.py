"""The gradients of one step: from backward passes to what the optimizer is given.

How they are summed over microbatches and ranks differs between layouts and modes; a step does not see how.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from meshwright.parallel.kin import Kin, sum_over_kin
from meshwright.parallel.leaves import Leaf, local


@dataclass(frozen=True, slots=True)
class Facts:
    """What the ranks find out together about a step's gradients; the same on every rank.

    Attributes:
        norm: global 2-norm, before `Gradients.factor`.
        idle: names of trainable parameters that no microbatch of any rank gave a gradient.
        bad_microbatch: the first whose own gradient is not finite; None if none is, or nobody looked.
        lost: by parameter, how many elements of one microbatch's gradient count as zero though they are not.
    """

    norm: float
    idle: list[str] = field(default_factory=list)
    bad_microbatch: int | None = None
    lost: dict[str, int] = field(default_factory=dict)


class Gradients(ABC):
    """Gradients of the trainable parameters on this rank.

    A step calls `begin`; `at` before each backward pass; after the last, `retry`, `summed` and `known`, whose numbers
    travel with the step's own, `facts`, and then `scale` before the optimizer or `drop` instead of it.

    Attributes:
        leaves: what the optimizer trains.
        factor: the sum over all ranks is this times what `scale` scales.
        kin: of each leaf, the other ranks that have the same part of it.
        replays_reduced: to be asked `finite` of a backward pass, it is run with its reduction.
    """

    replays_reduced: bool = False

    def __init__(self, leaves: Sequence[Leaf], factor: float, kin: Sequence[Kin] | None = None) -> None:
        self.leaves, self.factor = leaves, factor
        self.kin = [Kin()] * len(leaves) if kin is None else list(kin)

    def begin(self) -> None:
        """Whatever gradients lie about are not this step's."""
        self.drop()

    def at(self, index: int) -> None:  # noqa: B027 -- most need not know
        """The next backward pass is of this microbatch of the step."""

    def retry(self) -> str:
        """Why the step must be computed again; empty if not. Collective."""
        return ""

    @abstractmethod
    def summed(self) -> torch.Tensor:
        """(k,) fp64 numbers that the step sums over all ranks."""

    @abstractmethod
    def known(self) -> torch.Tensor:
        """(k,) fp64 numbers that are the same on all ranks."""

    @abstractmethod
    def facts(self, summed: Sequence[float], known: Sequence[float]) -> Facts:
        """What those numbers say, once they have been summed and read."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Give each leaf its gradient times `factor`; one without any gradient None, which optimizers pass by."""

    def drop(self) -> None:
        """Forget all gradients."""
        for leaf in self.leaves:
            leaf.parameter.grad = leaf.leaf.grad = None

    def state(self) -> dict[str, int]:
        """What the next step needs to know of this one, by parameter; a checkpoint keeps it."""
        return {}

    def load(self, state: dict[str, int]) -> None:  # noqa: B027 -- most know nothing
        """Put back what `state` gave."""

    def watch(self) -> None:  # noqa: B027 -- where gradients are kept, nothing need be prepared
        """From now on `finite` will be asked."""

    @abstractmethod
    def finite(self) -> bool:
        """Since `drop`, was every gradient of this rank's own microbatches finite?"""


@final
class Replicated(Gradients):
    """Gradients lie whole in the parameters, summed over the data-parallel ranks by DDP, or of one process.

    Args:
        leaves: of the parameters.
        factor: the sum over all ranks is this times what `scale` scales.
        kin: of each leaf; None if there is no tensor parallelism.
        counts: is this one of the ranks whose parts make up the norm?
    """

    def __init__(
        self, leaves: Sequence[Leaf], factor: float, kin: Sequence[Kin] | None = None, *, counts: bool = True
    ) -> None:
        super().__init__(leaves, factor, kin)
        self._is_cut, self._counts = kin is not None, counts

    def retry(self) -> str:
        """Add up what kin have; never a second time."""
        sum_over_kin(given(self.leaves, self.kin), [one for one in self.kin if one.sums])
        return ""

    def summed(self) -> torch.Tensor:
        """(1,) the squares of this rank's parts; (0,) where every rank has all gradients."""
        return squares(self._gradients(counting=True), self._device, self._counts) if self._is_cut else self._nothing

    def known(self) -> torch.Tensor:
        """(1,) the norm, where every rank has all gradients."""
        if self._is_cut:
            return self._nothing
        gradients = self._gradients()
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        return norm.to(self._device, torch.float64).reshape(1)

    def facts(self, summed: Sequence[float], known: Sequence[float]) -> Facts:
        """The norm, and who is idle, which DDP leaves without a gradient on every rank."""
        norm = root(summed[0]) if self._is_cut else known[0]
        return Facts(norm, [leaf.name for leaf in self.leaves if leaf.leaf.grad is None])

    def scale(self, factor: float) -> None:
        """Scale in place."""
        gradients = self._gradients()
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)

    def finite(self) -> bool:
        """Of the gradients as they lie, which no other rank's have been added to: replays are not reduced."""
        return all(bool(gradient.isfinite().all()) for gradient in self._gradients())

    def _gradients(self, *, counting: bool = False) -> list[torch.Tensor]:
        both = zip(self.leaves, self.kin, strict=True)
        return [leaf.leaf.grad for leaf, kin in both if leaf.leaf.grad is not None and (kin.counts or not counting)]

    @property
    def _device(self) -> torch.device:
        return self.leaves[0].leaf.device

    @property
    def _nothing(self) -> torch.Tensor:
        return torch.zeros(0, dtype=torch.float64, device=self._device)


def given(leaves: Sequence[Leaf], kin: Sequence[Kin]) -> list[torch.Tensor]:
    """This rank's parts of the gradients that kin add up; zeros, put there, for what has none."""
    parts = []
    for leaf, one in zip(leaves, kin, strict=True):
        if one.sums:
            if leaf.parameter.grad is None:
                leaf.parameter.grad = torch.zeros_like(leaf.parameter)
            parts.append(local(leaf.parameter.grad))
    return parts


def squares(gradients: list[torch.Tensor], device: torch.device, counts: bool) -> torch.Tensor:
    """(1,) fp64: the sum of their squares; 0 on ranks that do not count."""
    if not gradients or not counts:
        return torch.zeros(1, dtype=torch.float64, device=device)
    return torch.nn.utils.get_total_norm(gradients).double().square().reshape(1)


def root(square: float) -> float:
    """The norm of a sum of squares; what is not a number stays it."""
    return math.sqrt(square) if square >= 0 else square
