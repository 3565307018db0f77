"""The optimizers of torch.optim as data: options, types, limits, defaults; a recipe is checked without torch.

tests/spec/test_optimizers.py compares this table with torch's own signatures. What is not here, and why:

    LBFGS             calls the model several times a step through a closure; a step here is one pass
    SparseAdam        needs sparse gradients, which the reference models and the reductions do not have
    differentiable    back-propagates through the optimizer step; training never does
    capturable        for CUDA graphs, which are not used; refused by torch on CPU

`fused` differs from torch's default (unset): it is true where the CPU build has the kernel, because it is the same
formula and faster. The fused CPU kernels round the elements behind the last whole vector of a thread's share
differently (measured with torch 2.13: AdamW, 1003 elements cut in two, 2 elements differ after 20 steps; with foreach
or plain loops none, on any cut). Exact mode gives them whole vectors alone (parallel/leaves.py), but with several
threads a rank the shares end anywhere: there it is false.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import Fault
from meshwright.spec.keys import Key, Table
from meshwright.spec.nearest import closest, listed, shown
from meshwright.spec.sections import OptimizerSection, TrainSection
from meshwright.spec.values import converted, value_fault

NO_LIMITS = Key("")


@dataclass(frozen=True, slots=True)
class Option:
    """One argument of an optimizer.

    Attributes:
        kind: `float`, `int`, `bool` or `str`; with `items`, of each item.
        default: what leaving it out means; None: torch decides.
        limits: legal values.
        items: length of a list; 0 for a single value.
    """

    kind: str
    default: Any
    limits: Key = NO_LIMITS
    items: int = 0


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One class of torch.optim.

    Attributes:
        torch_name: the class's name there.
        options: its arguments besides the parameters and lr.
        elementwise: True if a weight's update needs only its own gradient and state, so any cut of a tensor is legal.
        only_matrices: True if it refuses parameters that are not 2-D.
        cuttable: True if it can update a parameter of which each rank has a part.
    """

    torch_name: str
    options: Mapping[str, Option]
    elementwise: bool = True
    only_matrices: bool = False
    cuttable: bool = True


@dataclass(frozen=True, slots=True)
class Group:
    """Options that differ for the parameters whose name matches a pattern.

    Attributes:
        pattern: of parameter names, as in `*.bias`.
        options: constructor keyword arguments, `lr` among them if given.
    """

    pattern: str
    options: dict[str, Any]


_AT_LEAST_0 = Key("", least=0.0)
_SHARE = Key("", least=0.0, below=1.0)


def _from_0(default: float) -> Option:
    return Option("float", default, _AT_LEAST_0)


def _flag(default: bool | None = False) -> Option:
    return Option("bool", default)


_BETAS = Option("float", (0.9, 0.999), _SHARE, items=2)
_COMMON = {"foreach": _flag(None), "maximize": _flag()}
_ADAM = {"betas": _BETAS, "eps": _from_0(1e-8), "weight_decay": _from_0(0.0)} | _COMMON
_DECOUPLED = {"decoupled_weight_decay": _flag()}
_FUSED = {"fused": _flag(True)}

OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": Optimizer(
        "SGD",
        {"momentum": _from_0(0.0), "dampening": Option("float", 0.0), "weight_decay": _from_0(0.0)}
        | {"nesterov": _flag()} | _COMMON | _FUSED,
    ),
    "adam": Optimizer("Adam", _ADAM | {"amsgrad": _flag()} | _DECOUPLED | _FUSED),
    "adamw": Optimizer("AdamW", _ADAM | {"weight_decay": _from_0(0.01), "amsgrad": _flag()} | _FUSED),
    "adamax": Optimizer("Adamax", _ADAM),
    "nadam": Optimizer("NAdam", _ADAM | {"momentum_decay": _from_0(0.004)} | _DECOUPLED),
    "radam": Optimizer("RAdam", _ADAM | _DECOUPLED),
    "adagrad": Optimizer(
        "Adagrad",
        {"lr_decay": _from_0(0.0), "weight_decay": _from_0(0.0), "initial_accumulator_value": _from_0(0.0)}
        | {"eps": _from_0(1e-10)} | _COMMON | _FUSED,
    ),
    "adadelta": Optimizer(
        "Adadelta",
        {"rho": Option("float", 0.9, Key("", least=0.0, most=1.0)), "eps": _from_0(1e-6)}
        | {"weight_decay": _from_0(0.0)} | _COMMON,
    ),
    "rmsprop": Optimizer(
        "RMSprop",
        {"alpha": Option("float", 0.99, Key("", least=0.0, most=1.0)), "eps": _from_0(1e-8)}
        | {"weight_decay": _from_0(0.0), "momentum": _from_0(0.0), "centered": _flag()} | _COMMON,
    ),
    "asgd": Optimizer(
        "ASGD",
        {"lambd": _from_0(1e-4), "alpha": _from_0(0.75), "t0": _from_0(1e6), "weight_decay": _from_0(0.0)} | _COMMON,
    ),
    "rprop": Optimizer(
        "Rprop",
        {"etas": Option("float", (0.5, 1.2), Key("", above=0.0), items=2)}
        | {"step_sizes": Option("float", (1e-6, 50.0), Key("", above=0.0), items=2)} | _COMMON,
    ),
    "adafactor": Optimizer(
        "Adafactor",
        {"beta2_decay": Option("float", -0.8, Key("", most=0.0)), "d": Option("float", 1.0, Key("", least=1.0))}
        | {"eps": Option("float", (None, 1e-3), _AT_LEAST_0, items=2), "weight_decay": _from_0(0.0)} | _COMMON,
        elementwise=False,
        cuttable=False,
    ),
    "muon": Optimizer(
        "Muon",
        {"weight_decay": _from_0(0.1), "momentum": _from_0(0.95), "nesterov": _flag(True), "eps": _from_0(1e-7)}
        | {"ns_coefficients": Option("float", (3.4445, -4.775, 2.0315), items=3)}
        | {"ns_steps": Option("int", 5, Key("", least=1, below=100))}
        | {"adjust_lr_fn": Option("str", None, Key("", choices=("original", "match_rms_adamw")))},
        elementwise=False,
        only_matrices=True,
    ),
}  # fmt: skip

REFUSED: Mapping[str, str] = {
    "differentiable": "back-propagates through the optimizer step, which training never does.",
    "capturable": "is for CUDA graphs, which meshwright does not use.",
}
WHOLE_OPTIMIZER = ("foreach", "fused")
"""Options that choose the kernel: one choice for all groups."""


def normalised(section: OptimizerSection, *, fused: bool = False) -> dict[str, Any]:
    """Keyword arguments for `torch.optim.<torch_name>`, lr among them, with every default written out.

    Args:
        section: an `[optimizer]` with a name, without faults.
        fused: whether the fused kernel is the default where there is one; see `may_fuse`.
    """
    table = OPTIMIZERS[section.name].options
    values = {name: option.default for name, option in table.items()} | _converted(section.options, table)
    if "fused" in table and "fused" not in section.options:
        values["fused"] = fused and not values["foreach"]
    return {"lr": section.lr} | {name: value for name, value in values.items() if value is not None}


def may_fuse(train: TrainSection) -> bool:
    """May fused kernels be used without a cut, or a thread, showing where the mode promises that none does?"""
    return train.reduction == "fast" or train.threads_per_rank == 1


def is_elementwise(section: OptimizerSection) -> bool:
    """Does a weight's update need only its own gradient and state? Of an optimizer of the user's own nobody knows."""
    return section.build is None and OPTIMIZERS[section.name].elementwise


def groups_of(section: OptimizerSection) -> tuple[Group, ...]:
    """The parameter groups in order; the first whose pattern matches a parameter counts."""
    if section.build is not None:  # its options are its own; only the pattern is ours
        return tuple(Group(g["pattern"], {n: v for n, v in g.items() if n != "pattern"}) for g in section.groups)
    table = dict(OPTIMIZERS[section.name].options) | {"lr": _from_0(0.0)}
    return tuple(
        Group(group["pattern"], _converted({n: v for n, v in group.items() if n != "pattern"}, table))
        for group in section.groups
    )


def _converted(values: Table, table: Mapping[str, Option]) -> dict[str, Any]:
    return {name: _as_option(value, table[name]) for name, value in values.items()}


def _as_option(value: Any, option: Option) -> Any:
    if option.items:
        return tuple(converted(item, option.kind) for item in value)
    return converted(value, option.kind)


def optimizer_faults(section: OptimizerSection) -> Iterator[Fault]:
    """Everything wrong with the name, the options and the groups of an `[optimizer]`."""
    known = OPTIMIZERS.get(section.name)
    if known is None:
        yield _unknown_name(section.name)
        return
    faults = [
        fault
        for name, value in section.options.items()
        for fault in _option_faults(f"optimizer.{name}", name, value, section.name)
    ]
    yield from faults or _combination_faults("optimizer", section.name, section.options)
    yield from _group_faults(section, sound=not faults)


def _unknown_name(name: str) -> Fault:
    where = "optimizer.name"
    if name.lower() == "lbfgs":
        rule = (
            '"lbfgs" needs a closure that calls the model several times a step; a step here is one pass over its batch.'
        )
        return Fault(where, rule, 'Nearest: "adamw".')
    near = closest(name, OPTIMIZERS, 0.5)
    return Fault(where, f"{shown(name)} is not one of {', '.join(OPTIMIZERS)}.", f'Nearest: "{near}".' if near else "")


def _option_faults(where: str, name: str, value: Any, optimizer: str) -> Iterator[Fault]:
    table = OPTIMIZERS[optimizer].options
    if name in REFUSED:
        yield Fault(where, REFUSED[name], "Leave it out.")
    elif name not in table:
        owners = [other for other, known in OPTIMIZERS.items() if name in known.options]
        near = closest(name, [*table, "lr", "name", "max_grad_norm", "lr_scaling", "groups"])
        hint = f"Nearest: {near}." if near else (f"It is an option of {listed(owners, 'and')}." if owners else "")
        yield Fault(where, f"is no option of {optimizer}, which has {', '.join(table)}.", hint)
    elif table[name].items:
        yield from _list_faults(where, value, table[name])
    else:
        yield from filter(None, [value_fault(where, value, table[name].kind, table[name].limits)])


def _list_faults(where: str, value: Any, option: Option) -> Iterator[Fault]:
    if not isinstance(value, (list, tuple)) or len(value) != option.items:
        rule = f"is {shown(value)}, must be a list of {option.items} numbers."
        usual = shown([item for item in option.default if item is not None])
        yield Fault(
            where, rule, f"Nearest: {usual}." if None not in option.default else "Leave it out for torch's own."
        )
        return
    for index, item in enumerate(value):
        yield from filter(None, [value_fault(f"{where}[{index}]", item, option.kind, option.limits)])


def _combination_faults(where: str, optimizer: str, given: Table) -> Iterator[Fault]:
    value = {name: option.default for name, option in OPTIMIZERS[optimizer].options.items()} | dict(given)
    if optimizer == "sgd" and value["nesterov"] and (value["momentum"] <= 0 or value["dampening"] != 0):
        got = f"momentum {value['momentum']:g} and dampening {value['dampening']:g}"
        rule = f"Nesterov momentum needs momentum above 0 and dampening 0, not {got}."
        yield Fault(f"{where}.nesterov", rule, "Nearest: momentum = 0.9, dampening = 0.")
    if given.get("fused") and given.get("foreach"):
        yield Fault(
            f"{where}.fused", "fused and foreach are two kernels for the same step; one at most.", "Drop foreach."
        )
    if optimizer == "rprop" and not value["etas"][0] < 1.0 < value["etas"][1]:
        low, high = value["etas"]
        rule = f"is [{low:g}, {high:g}]; steps shrink by the first (below 1) and grow by the second (above 1)."
        yield Fault(f"{where}.etas", rule, "Nearest: [0.5, 1.2].")
    if optimizer == "rprop" and value["step_sizes"][0] > value["step_sizes"][1]:
        low, high = value["step_sizes"]
        yield Fault(
            f"{where}.step_sizes", f"smallest {low:g} is above largest {high:g}.", f"Nearest: [{high:g}, {low:g}]."
        )


def _group_faults(section: OptimizerSection, sound: bool) -> Iterator[Fault]:
    patterns: dict[str, int] = {}
    for index, group in enumerate(section.groups):
        where = f"optimizer.groups[{index}]"
        pattern = group.get("pattern")
        if not isinstance(pattern, str) or not pattern:
            yield Fault(f"{where}.pattern", "is required: a pattern of parameter names.", 'Such as "*.bias".')
        elif pattern in patterns:
            rule = f"{shown(pattern)} stands in groups[{patterns[pattern]}] already, and the first match counts."
            yield Fault(f"{where}.pattern", rule, "Put the options of both into one table.")
        else:
            patterns[pattern] = index
        options = {name: value for name, value in group.items() if name != "pattern"}
        faults = list(_group_option_faults(section.name, where, options))
        yield from faults
        if sound and not faults:
            both = dict(section.options) | options
            yield from (f for f in _combination_faults(where, section.name, both) if f.where.split(".")[-1] in options)


def _group_option_faults(optimizer: str, where: str, options: Table) -> Iterator[Fault]:
    if not options:
        yield Fault(where, "changes nothing: it has no option besides its pattern.", "Such as weight_decay = 0.0.")
    for name, value in options.items():
        path = f"{where}.{name}"
        if name == "lr":
            yield from filter(None, [value_fault(path, value, "float", _AT_LEAST_0)])
        elif name in WHOLE_OPTIMIZER:
            yield Fault(path, "chooses the kernel of the whole optimizer.", f"Nearest: optimizer.{name}.")
        else:
            yield from _option_faults(path, name, value, optimizer)
