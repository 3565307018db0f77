"""What can be read off any nn.Module without running it: its blocks, its ties, its parameters in a fixed order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

Named = list[tuple[str, nn.Module]]
"""Modules with their qualified names."""

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def bare_name(name: str) -> str:
    """A name without the prefixes of torch.compile, which wraps modules: what it is called in the bare module."""
    return name.replace("_orig_mod.", "")


def parameters_in_order(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Each parameter once, in the sorted order of names; a tied one under the first of its names."""
    first: dict[int, tuple[str, nn.Parameter]] = {}
    named = [(bare_name(name), parameter) for name, parameter in model.named_parameters(remove_duplicate=False)]
    for name, parameter in sorted(named, key=lambda row: row[0]):
        first.setdefault(id(parameter), (name, parameter))
    return list(first.values())


def tied_groups(model: nn.Module) -> list[list[str]]:
    """Names that share one parameter, sorted: `[["embedding.weight", "head.weight"]]`."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(bare_name(name))
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def with_extra_state(model: nn.Module) -> list[str]:
    """Names of the modules that keep state of a form of their own, which is neither parameter nor buffer."""
    return [
        bare_name(name)
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]


def batch_norms(model: nn.Module) -> list[str]:
    """Names of the modules whose running statistics depend on which samples a rank saw."""
    return [
        bare_name(name)
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
    ]


def repeated_blocks(model: nn.Module) -> Named:
    """The layers that a model repeats, in order: what is gathered, recomputed or cut one at a time.

    These are the same-typed elements with parameters of the model's lists (ModuleList, Sequential, ModuleDict): of the
    type that has most of them. A list inside a block (experts, the layers of an MLP) does not count, one inside a stage
    does: a stage is an element that is little more than a list. Bare layers of torch.nn are blocks only where a model
    repeats nothing larger. Empty if nothing is repeated.
    """
    families = _families(model)
    large = {kind: members for kind, members in families.items() if not is_bare_layer(members[0][1])}
    found = max((large or families).values(), key=len, default=[])
    return [(bare_name(name), block) for name, block in found] if large or len(found) > 1 else []


def is_bare_layer(module: nn.Module) -> bool:
    """Is this a single layer of torch.nn, as nn.Linear is?"""
    return type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())


def _families(model: nn.Module) -> dict[type[nn.Module], Named]:
    """The elements of all outermost lists, by type; a list gives only its most frequent type."""
    families: dict[type[nn.Module], Named] = {}
    inside: tuple[str, ...] = ()  # prefixes of the elements found so far
    for name, module in model.named_modules():
        if not isinstance(module, _LISTS) or name.startswith(inside):
            continue
        elements = [(_join(name, part), child) for part, child in module.named_children() if _has_parameters(child)]
        elements = [(where, child) for where, child in elements if not _is_stage(child)]
        for kind, _ in Counter(type(child) for _, child in elements).most_common(1):
            family = [(where, child) for where, child in elements if type(child) is kind]
            families.setdefault(kind, []).extend(family)
            inside += tuple(where + "." for where, _ in family)
    return families


def _is_stage(module: nn.Module) -> bool:
    """Is this a list, or a list with at most one more part (as a downsampling), and no parameters of its own?"""
    if isinstance(module, _LISTS):
        return not _is_chain(module)
    parts = [child for child in module.children() if _has_parameters(child)]
    owns = any(True for _ in module.parameters(recurse=False))
    return not owns and len(parts) <= 2 and any(isinstance(part, _LISTS) and not _is_chain(part) for part in parts)


def _is_chain(module: nn.Module) -> bool:
    """Is this a list of bare layers only, as Sequential(Linear, GELU, Linear)? Then it is a block, not a stage."""
    return all(is_bare_layer(child) for child in _parametrised(module))


def _parametrised(module: nn.Module) -> Iterator[nn.Module]:
    return (child for child in module.children() if _has_parameters(child))


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
