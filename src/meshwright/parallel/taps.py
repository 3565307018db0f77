"""Hooks on gathered parameters: a look at each gradient of this rank's own, before it is summed over ranks.

FSDP makes the gathered parameters in the first forward pass of their unit and keeps them, so a hook is registered once,
by a forward pre-hook that runs after FSDP's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final

import torch
import torch.nn as nn

Place = tuple[nn.Module, str, int]
"""A module, the name that it has for a parameter, and the number of that parameter."""

OnGradient = Callable[[int, torch.Tensor], torch.Tensor | None]
"""Called with a parameter's number and its gradient in one microbatch; may return another in its place."""


@final
class Taps:
    """Calls `on_gradient`, once it is set, for each gradient of each backward pass."""

    def __init__(self, on_gradient: OnGradient | None = None) -> None:
        self.on_gradient = on_gradient
        self._tapped: set[int] = set()

    def watch(self, unit: nn.Module, places: Iterable[Place]) -> None:
        """Have the parameters of a unit seen, in these places; after FSDP has registered its hooks."""
        places = list(places)
        unit.register_forward_pre_hook(lambda module, args: self._tap(places))

    def _tap(self, places: list[Place]) -> None:
        if self.on_gradient is None:
            return
        for module, name, number in places:
            parameter: Any = module._parameters[name]
            if parameter.requires_grad and id(parameter) not in self._tapped:
                self._tapped.add(id(parameter))
                parameter.register_hook(partial(self._pass, number))

    def _pass(self, number: int, gradient: torch.Tensor) -> torch.Tensor | None:
        return self.on_gradient(number, gradient) if self.on_gradient is not None else None
