"""Which modules ZeRO gathers one at a time: each is a unit, and what is left is gathered with the model as a whole."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn as nn

from meshwright.errors import SpecError
from meshwright.models.anatomy import bare_name, repeated_blocks
from meshwright.spec.nearest import closest, first_of


@dataclass(frozen=True, slots=True)
class Units:
    """How a model is divided.

    Attributes:
        modules: the units, inner ones before those around them.
        sharing: names of blocks that are no units, because they share parameters with modules outside.
    """

    modules: list[nn.Module]
    sharing: list[str]


def find_units(model: nn.Module, patterns: Sequence[str] | None) -> Units:
    """The repeated blocks, or the modules that the patterns name.

    A parameter belongs to one unit: a block that shares one with the rest of the model (a tied weight) stays with it.

    Args:
        model: bare.
        patterns: of module names, as in `encoder.layers.*`, where * stands for no dot; None finds the repeated blocks.

    Raises:
        SpecError: a pattern matches no module that has parameters.
    """
    named = repeated_blocks(model) if patterns is None else _named(model, patterns)
    named = [(name, module) for name, module in named if module is not model and not isinstance(module, nn.ModuleList)]
    inside = {id(module): {id(m) for m in module.modules()} for _, module in named}
    owners = _owners(model)
    sharing = [name for name, module in named if _shares(module, inside, owners)]
    modules = [module for name, module in named if name not in sharing]
    return Units(sorted(modules, key=lambda module: len(inside[id(module)])), sharing)


def _named(model: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Modules whose names match, in the model's order."""
    having = [(bare_name(n), m) for n, m in model.named_modules() if n and any(True for _ in m.parameters())]
    for i, pattern in enumerate(patterns):
        if not any(_matches(name, pattern) for name, _ in having):
            near = closest(pattern, [name for name, _ in having], 0.4)
            raise SpecError(
                f"layout.units[{i}] = {pattern!r}",
                f"matches no module with parameters; their names are {first_of([name for name, _ in having])}.",
                f"Nearest: {near!r}." if near else "",
            )
    return [(name, m) for name, m in having if any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    """Part by part, as in paths: `layers.*` means the layers, and not all that is in them."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _owners(model: nn.Module) -> dict[int, set[int]]:
    """For each parameter the modules that hold it."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(id(module))
    return owners


def _shares(module: nn.Module, inside: dict[int, set[int]], owners: dict[int, set[int]]) -> bool:
    """Is one of its parameters held outside of it, or a module of it part of another unit that is not around it?"""
    mine = inside[id(module)]
    if any(not owners[id(parameter)] <= mine for parameter in module.parameters()):
        return True
    holders = {owner for parameter in module.parameters() for owner in owners[id(parameter)]}
    others = (theirs for theirs in inside.values() if theirs != mine and not theirs <= mine and not mine <= theirs)
    return any(holders & theirs for theirs in others)
