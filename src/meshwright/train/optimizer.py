"""The optimizer a recipe names, its parameter groups, and the learning rate of each step."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn as nn

from meshwright.errors import SpecError
from meshwright.models.resolve import resolve_callable
from meshwright.spec.optimizers import OPTIMIZERS, Group, groups_of, normalised
from meshwright.spec.sections import OptimizerSection

PEAK: Final = "peak_lr"
"""Key of a parameter group that holds its rate before the schedule."""

NAMES: Final = "param_names"
"""Key of a parameter group that holds the names of its parameters; torch's own, where it was given named parameters."""

Named = Sequence[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[..., torch.optim.Optimizer]
"""A user's own optimizer: f(parameter groups, lr=..., options) -> optimizer, as torch.optim's classes are."""


def build_optimizer(
    section: OptimizerSection,
    named: Named,
    *,
    fused: bool = True,
    lr_factor: float = 1.0,
    factory: OptimizerFactory | None = None,
) -> torch.optim.Optimizer:
    """Make the optimizer over the trainable parameters.

    Args:
        section: name, rate, options and groups.
        named: every parameter once, with its name.
        fused: whether the fused kernel is the default where there is one.
        lr_factor: what `lr_scaling` multiplies every rate by.
        factory: takes the place of `name` and its options.

    Raises:
        SpecError: nothing to train, or a group's pattern matches no parameter.
    """
    trainable = require_trainable(named)
    groups = [_group(members, group) for members, group in _assign(groups_of(section), trainable)]
    if factory is None and section.build is not None:
        factory = resolve_callable(section.build, "optimizer.build")
    if factory is None:
        options = normalised(section, fused=fused)
        optimizer = getattr(torch.optim, OPTIMIZERS[section.name].torch_name)(groups, **options)
    else:
        optimizer = _call(factory, groups, {"lr": section.lr, **section.options})
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SpecError("optimizer", f"made a {type(optimizer).__name__}, and a torch.optim.Optimizer is needed.")
    _name_parameters(optimizer, trainable)
    for group in optimizer.param_groups:
        group["lr"] *= lr_factor
        group[PEAK] = group["lr"]
    return optimizer


def require_trainable(named: Named) -> Named:
    """Those parameters that are trained.

    Raises:
        SpecError: none is.
    """
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trainable:
        raise SpecError("the model", f"has no trainable parameter ({len(named)} in all).", "Set requires_grad on some.")
    return trainable


def _name_parameters(optimizer: torch.optim.Optimizer, trainable: Named) -> None:
    """Write the names into the groups: a user's own optimizer may have made groups of its own.

    Raises:
        SpecError: it does not hold each trainable parameter once.
    """
    names = {id(parameter): name for name, parameter in trainable}
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    missing = [name for key, name in names.items() if key not in held]
    if missing or len(held) != len(names) or not names.keys() >= set(held):
        rule = f"holds {len(held)} parameters, and the model has {len(names)} to train"
        listed = f"; it lacks {', '.join(missing[:4])}" if missing else ""
        raise SpecError(
            f"optimizer {type(optimizer).__name__}",
            f"{rule}{listed}.",
            "Give it every parameter of the groups; freeze what it shall not train with requires_grad = False.",
        )
    for group in optimizer.param_groups:
        group[NAMES] = [names[id(parameter)] for parameter in group["params"]]


def _call(factory: OptimizerFactory, groups: list[dict[str, Any]], options: Mapping[str, Any]) -> torch.optim.Optimizer:
    try:
        return factory(groups, **options)
    except (TypeError, ValueError) as error:
        name = getattr(factory, "__qualname__", repr(factory))
        raise SpecError(f"optimizer {name}", f"cannot be made with {', '.join(options)}: {error}.") from error


def _assign(groups: Sequence[Group], named: Named) -> list[tuple[Named, Group]]:
    """Each parameter goes to the first group whose pattern matches its name, else to the rest."""
    members: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(len(groups) + 1)]
    for name, parameter in named:
        matches = (i for i, group in enumerate(groups) if fnmatch.fnmatchcase(name, group.pattern))
        members[next(matches, len(groups))].append((name, parameter))
    for i, group in enumerate(groups):
        if not members[i]:
            raise SpecError(
                f"optimizer.groups[{i}].pattern = {group.pattern!r}",
                "matches no trainable parameter that an earlier group has not taken.",
                f"Names look like {', '.join(name for name, _ in named[:4])}.",
            )
    rest = Group("*", {})
    return [(found, group) for found, group in zip(members, [*groups, rest], strict=True) if found]


def _group(members: Named, group: Group) -> dict[str, Any]:
    return {"params": [p for _, p in members], NAMES: [name for name, _ in members], **group.options}


def set_rate(optimizer: torch.optim.Optimizer, multiplier: float) -> None:
    """Give every group its peak rate times the schedule's multiplier."""
    for group in optimizer.param_groups:
        group["lr"] = group[PEAK] * multiplier


def named_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Optimizer state as flat names, `STATE/PARAMETER` -> tensor. Scalars are tensors of no dimension."""
    flat = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group[NAMES], group["params"], strict=True):
            for state, value in optimizer.state.get(parameter, {}).items():
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
                flat[f"{state}/{name}"] = tensor
    return flat


def load_named_state(optimizer: torch.optim.Optimizer, flat: Mapping[str, torch.Tensor]) -> None:
    """Put back what `named_state` gave, each tensor on its parameter's device, in the type it was saved in."""
    places = {n: (p, g) for g in optimizer.param_groups for n, p in zip(g[NAMES], g["params"], strict=True)}
    for key, tensor in flat.items():
        state, _, name = key.partition("/")
        if name in places:
            parameter, group = places[name]
            # torch keeps step counters on the host, unless the kernel of the update reads them
            on_host = state == "step" and not (group.get("fused") or group.get("capturable"))
            optimizer.state[parameter][state] = tensor.to("cpu" if on_host else parameter.device, copy=True)
