"""Tied parameters taken apart, where one tensor cannot serve two places.

A table that the embedding and the head share is one parameter. It becomes two of equal values where

* the two are on different stages of a pipeline, or roots of different units of ZeRO;
* exact mode rounds the gradient of each use by itself, as a pipeline must, and ZeRO cuts the table.

The second is no parameter of the model's own: it has no name in checkpoints and no state of the optimizer. Its gradient
is added to the first's, and after each update it takes over the first's values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn

from meshwright.models.anatomy import bare_name, repeated_blocks
from meshwright.parallel.leaves import local


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module holds a parameter.

    Attributes:
        module: that holds it.
        attribute: under this name.
        name: of the parameter, in the whole model.
    """

    module: nn.Module
    attribute: str
    name: str

    @property
    def parameter(self) -> nn.Parameter:
        """What is there now."""
        found = self.module._parameters[self.attribute]
        assert found is not None, self.name
        return found


def parted_places(model: nn.Module) -> list[list[Place]]:
    """The places of each tied parameter that is outside of the repeated blocks, which is all that a pipeline can part.

    In the sorted order of names; the first one's name is the parameter's. What is tied inside of blocks stays so on
    every layout.
    """
    inside = {id(module) for _, block in repeated_blocks(model) for module in block.modules()}
    return [found for found in tied_places(model) if not any(id(place.module) in inside for place in found)]


def tied_places(model: nn.Module) -> list[list[Place]]:
    """The places of each tied parameter, in the sorted order of its names."""
    places: dict[int, list[Place]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                name = bare_name(f"{prefix}.{attribute}" if prefix else attribute)
                places.setdefault(id(parameter), []).append(Place(module, attribute, name))
    return [sorted(found, key=lambda place: place.name) for found in places.values() if len(found) > 1]


@dataclass(frozen=True, slots=True)
class Twin:
    """A tied parameter taken apart.

    Attributes:
        first: the parameter.
        second: what stands for it elsewhere.
    """

    first: Place
    second: Place

    def follow(self) -> None:
        """Take over the first one's values; both are cut alike."""
        with torch.no_grad():
            local(self.second.parameter).copy_(local(self.first.parameter))


def untie(model: nn.Module) -> list[Twin]:
    """Give every further place of a tied parameter one of its own, where it can be parted: equal values, if any."""
    twins = []
    for first, *others in parted_places(model):
        for place in others:
            values = first.parameter.detach()
            own = values if values.is_meta else values.clone()
            place.module._parameters[place.attribute] = nn.Parameter(own.clone(), first.parameter.requires_grad)
            twins.append(Twin(first, place))
    return twins
