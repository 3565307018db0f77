"""A module as `[model]` described it, with its values or without memory for them yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn as nn

from meshwright.models.anatomy import parameters_in_order

Index = tuple[slice, ...]
"""A part of a tensor: one slice for each dimension, or for the first of them."""

Fill = Callable[[str, torch.Tensor, Index], None]
"""fill(name, part, index) writes that part of a parameter into `part`; a tied one goes by the first of its names."""


@dataclass(frozen=True, slots=True)
class Built:
    """What a recipe's model came to.

    Attributes:
        module: bare; its parameters are on the meta device if there is a `fill`.
        fill: gives each parameter its values once the module has been cut; None if they have them.
        lines: what the user should know.
        warnings: what the user should know because it is not as they may think.
    """

    module: nn.Module
    fill: Fill | None = None
    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, what becomes a module's parameter gives up its memory at once; buffers are real.

    The tensor is emptied in place, so that a second module that is given the same one is tied to the first.
    """
    register = nn.Module.register_parameter

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            _become(parameter, parameter.detach().to("meta"))
        register(module, name, parameter)

    nn.Module.register_parameter = emptied  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def fill_whole(built: Built) -> Built:
    """Give every parameter memory and its values, where nothing is cut."""
    if built.fill is None:
        return built
    for name, parameter in parameters_in_order(built.module):
        _become(parameter, torch.empty_like(parameter, device="cpu"))
        built.fill(name, parameter.detach(), ())
    return replace(built, fill=None)


def _become(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    """Put a tensor in a parameter's place, whoever holds the parameter."""
    torch.utils.swap_tensors(parameter, nn.Parameter(tensor, parameter.requires_grad))  # type: ignore[no-untyped-call]


def cast_masters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters and buffers in place, so that ties hold."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
