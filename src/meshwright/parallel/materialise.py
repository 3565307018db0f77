"""Memory and values for what a rank has left of a model."""

from __future__ import annotations

import torch
import torch.nn as nn

from meshwright.models.anatomy import parameters_in_order
from meshwright.models.built import Fill
from meshwright.parallel.homes import Homes
from meshwright.parallel.leaves import local


def give_memory(root: nn.Module, device: torch.device) -> None:
    """Replace parameters on the meta device, once cut, by memory for this rank's parts; buffers keep their values."""
    kept = [(module, name, buffer) for module in root.modules() for name, buffer in module._buffers.items()]
    root.to_empty(device=device)
    for module, name, buffer in kept:
        module._buffers[name] = buffer


def give_values(model: nn.Module, homes: Homes, fill: Fill) -> None:
    """Fill this rank's parts; twins of tied parameters too."""
    for name, parameter in parameters_in_order(model):
        fill(homes.first_name.get(name, name), local(parameter), homes.index(name, parameter))


def materialise(model: nn.Module, homes: Homes, fill: Fill | None, device: torch.device) -> None:
    """Give a model that no ZeRO cuts memory on the device, and its values if it has none."""
    if fill is not None:
        for _, parameter in parameters_in_order(model):
            own = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, own)  # type: ignore[no-untyped-call]
        give_values(model, homes, fill)
    model.to(device)
