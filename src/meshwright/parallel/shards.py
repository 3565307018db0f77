"""Gradients of a model that ZeRO has cut, summed as floating-point numbers usually are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from meshwright.parallel.calls import Calls
from meshwright.parallel.gradients import Facts, Gradients, given, root, squares
from meshwright.parallel.kin import Kin, sum_over_kin
from meshwright.parallel.leaves import Leaf, local
from meshwright.parallel.taps import Taps


@final
class ShardGradients(Gradients):
    """This rank's parts of the gradients, which FSDP leaves beside the parameters.

    Args:
        leaves: of the sharded parameters.
        counts: is this rank's replica the one whose parts make up the norm?
        taps: on the gradients of this rank's own.
        looks: some parameters may get no gradient; look which.
        calls: of the units.
        ranks: all, who compare their calls.
        kin: of each leaf.
    """

    replays_reduced = True  # unreduced, FSDP would keep them out of sight

    def __init__(
        self,
        leaves: Sequence[Leaf],
        *,
        counts: bool,
        taps: Taps,
        looks: bool,
        calls: Calls,
        ranks: int,
        kin: Sequence[Kin] | None = None,
    ) -> None:
        super().__init__(leaves, factor=1.0, kin=kin)
        self._calls, self._ranks = calls, ranks
        self._counts, self._arrived, self._taps = counts, [not looks] * len(leaves), taps
        self._looks, self._watches = looks, False
        self._unsound: list[torch.Tensor] = []
        if looks:
            taps.on_gradient = self._note

    def begin(self) -> None:
        """Forget gradients, and who had some."""
        super().begin()
        self._calls.begin()
        self._arrived = [not self._looks] * len(self.leaves)

    def _note(self, number: int, gradient: torch.Tensor) -> None:
        self._arrived[number] = True
        if self._watches:
            self._unsound.append(~gradient.isfinite().all())

    def watch(self) -> None:
        """Look at the numbers too."""
        self._watches, self._taps.on_gradient = True, self._note

    def finite(self) -> bool:
        """Of what the taps saw."""
        return not any(map(bool, self._unsound))

    def retry(self) -> str:
        """Add up what kin have; never a second time."""
        sum_over_kin(given(self.leaves, self.kin), [one for one in self.kin if one.sums])
        return ""

    def summed(self) -> torch.Tensor:
        """(k + 1 + leaves,): k of `Calls`, the sum of squares of this rank's parts, and who had a gradient here."""
        before = torch.tensor(self._calls.numbers(), dtype=torch.float64, device=self._device)
        arrived = torch.tensor(list(map(float, self._arrived)), dtype=torch.float64, device=self._device)
        return torch.cat([before, squares(self._counting(), self._device, self._counts), arrived])

    def known(self) -> torch.Tensor:
        """Nothing: no rank has all."""
        return torch.zeros(0, dtype=torch.float64, device=self._device)

    def facts(self, summed: Sequence[float], known: Sequence[float]) -> Facts:
        """The norm; a parameter that no rank used has a gradient of zeros here, and is idle all the same."""
        split = len(summed) - len(self.leaves) - 1
        self._calls.require_same(summed[:split], self._ranks)
        square, *arrived = summed[split:]
        self._arrived = [count > 0 for count in arrived]
        both = zip(self.leaves, self._arrived, strict=True)
        return Facts(root(square), [leaf.name for leaf, has in both if not has or leaf.parameter.grad is None])

    def scale(self, factor: float) -> None:
        """Give the leaves their parts, scaled in place."""
        for leaf, has in zip(self.leaves, self._arrived, strict=True):
            gradient = leaf.parameter.grad
            if leaf.leaf is leaf.parameter:
                leaf.parameter.grad = gradient if has else None
            else:
                leaf.leaf.grad = local(gradient) if has and gradient is not None else None
        gradients: list[Any] = [local(leaf.leaf.grad) for leaf in self.leaves if leaf.leaf.grad is not None]
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def drop(self) -> None:
        """Forget all gradients."""
        super().drop()
        self._unsound = []

    def _counting(self) -> list[torch.Tensor]:
        both = zip(self.leaves, self.kin, strict=True)
        return [local(x.parameter.grad) for x, kin in both if x.parameter.grad is not None and kin.counts]

    @property
    def _device(self) -> torch.device:
        return local(self.leaves[0].parameter).device
