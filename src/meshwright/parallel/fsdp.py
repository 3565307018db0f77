"""ZeRO: optimizer state, gradients and parameters cut over the ranks of dp_shard, by FSDP2's `fully_shard`.

    stage   gathered parameters are freed     gradients wait between microbatches   all ranks hold whole
    1       after the last backward pass      whole, and are cut once, at the end   parameters and gradients
    2       after the last backward pass      cut, after each backward pass         parameters
    3       after each use                    cut, after each backward pass         one unit at a time

`sync` moves the third column: "last" keeps whole gradients until the last microbatch, "every" cuts them after each.
With dp_replicate > 1 (HSDP) the shards of the replicas are summed once, after the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _NormBase

from meshwright.errors import SpecError
from meshwright.models.anatomy import bare_name, parameters_in_order
from meshwright.models.chain import Section
from meshwright.parallel.calls import Calls, never_a_view
from meshwright.parallel.ends import Ends
from meshwright.parallel.entry import Entry
from meshwright.parallel.taps import Place, Taps
from meshwright.parallel.twins import Twin


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRules:
    """How a model is cut.

    Attributes:
        mesh: dp_replicate x dp_shard.
        zero_stage: 1 | 2 | 3.
        param_dtype: that parameters are gathered in; None for their own.
        reduce_dtype: that gradients are summed in; None if they are not summed here.
        may_skip_parameters: some parameters may get no gradient in some microbatches.
        entered: told the name of each unit as it is called.
    """

    mesh: DeviceMesh
    zero_stage: int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    may_skip_parameters: bool
    entered: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sharded:
    """A model that has been cut.

    Attributes:
        entry: its root unit.
        parameters: name and parameter of all that is trained.
        taps: on the gradients of this rank's own, numbered as `parameters`.
        calls: of the units.
        ends: of their backward passes.
        switches: of the units.
    """

    entry: Entry
    parameters: list[tuple[str, nn.Parameter]]
    taps: Taps
    calls: Calls
    ends: Ends
    switches: Switches


def shard(model: nn.Module, units: Sequence[nn.Module], rules: ShardRules) -> Sharded:
    """Cut a model over a mesh, unit by unit.

    The root unit is the entry around the model: any function of the model is then one forward pass of it, and the model
    keeps its class and the names of its parameters.

    Args:
        model: whole, equal on every rank; or all parameters on the meta device.
        units: modules that are gathered one at a time, inner ones first.
        rules: how.

    Raises:
        SpecError: it has a parameter that cannot be cut.
    """
    named = parameters_in_order(model)
    require_cuttable(named)
    numbers = {id(parameter): i for i, (_, parameter) in enumerate((n, p) for n, p in named if p.requires_grad)}
    names = {id(module): bare_name(name) for name, module in model.named_modules()}
    trainable = [name for name, parameter in named if id(parameter) in numbers]
    entry, taps, calls, ends = Entry(model), Taps(), Calls(rules.entered), Ends()
    all_units = [*(norm for norm in _norms_apart(model, rules.param_dtype) if norm not in units), *units, entry]
    places = _places(all_units, numbers)
    trained: list[Place] = [place for found in places for place in found]
    for unit, found in zip(all_units, places, strict=True):
        if unit is not entry:
            never_a_view(unit)
        # The root's backward begins where its forward ends: what it freed there it would gather again at once.
        _shard_unit(unit, rules, frees=rules.zero_stage == 3 and unit is not entry)
        taps.watch(unit, found)
        if rules.may_skip_parameters:
            ends.watch(unit, found, partial(calls.ended, names.get(id(unit), "")))
        if unit is not entry:
            calls.watch(unit, names[id(unit)])
    owners = {number: (module, attribute) for module, attribute, number in trained}
    cut = [cast(nn.Parameter, owners[i][0]._parameters[owners[i][1]]) for i in range(len(trainable))]
    return Sharded(entry, list(zip(trainable, cut, strict=True)), taps, calls, ends, Switches(entry, rules))


def shard_sections(sections: Iterable[Section], rules: ShardRules) -> None:
    """Cut the stages of a pipeline, each a root with its blocks as units.

    FSDP gathers here and frees, and that is all: it neither sums gradients nor frees a stage between microbatches,
    whose backward passes may come in two halves (torch 2.13 gives wrong gradients then, without an error).
    """
    for section in sections:
        for block in section.blocks:
            never_a_view(block)
            _shard_unit(block, rules, frees=rules.zero_stage == 3)
        _shard_unit(section, rules, frees=False)
        root = cast(FSDPModule, section)
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_backward(False)
        root.set_is_last_backward(True)


def units_of(sections: Iterable[nn.Module]) -> list[FSDPModule]:
    """What is gathered together, of sections that `shard_sections` has cut."""
    return [unit for section in sections for unit in section.modules() if isinstance(unit, FSDPModule)]


def require_cuttable(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse scalars, and lay out the others row by row."""
    for name, parameter in named:
        if parameter.ndim == 0:
            raise SpecError(
                f"parameter {name}",
                "is a scalar, and ZeRO cuts parameters along their first dimension.",
                "Give it the shape (1,), or train with ddpN.",
            )
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _norms_apart(model: nn.Module, param_dtype: torch.dtype | None) -> list[nn.Module]:
    """Batch norms, which keep fp32 parameters under any compute type (see parallel/mixed.py)."""
    if param_dtype is None:
        return []
    return [m for m in model.modules() if isinstance(m, _NormBase) and any(True for _ in m.parameters())]


def _places(units: Sequence[nn.Module], numbers: dict[int, int]) -> list[list[Place]]:
    """For each unit where its own trained parameters are; inner units come first and take theirs."""
    taken: set[int] = set()
    found: list[list[Place]] = []
    for unit in units:
        modules = [module for module in unit.modules() if id(module) not in taken]
        taken.update(map(id, modules))
        found.append(
            [
                (module, name, numbers[id(parameter)])
                for module in modules
                for name, parameter in module._parameters.items()
                if parameter is not None and id(parameter) in numbers
            ]
        )
    return found


def _shard_unit(unit: nn.Module, rules: ShardRules, *, frees: bool) -> None:
    half = None if isinstance(unit, _NormBase) else rules.param_dtype
    policy = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=rules.reduce_dtype, cast_forward_inputs=False, output_dtype=None
    )
    fully_shard(unit, mesh=rules.mesh, mp_policy=policy, reshard_after_forward=frees)
    sharded = cast(FSDPModule, unit)
    # Gradients are summed; the step divides by the count of the whole batch itself. (A factor of 1 alone would still
    # divide before and after the reduction.)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


@final
class Switches:
    """What FSDP must be told before each microbatch, told only where it changes."""

    def __init__(self, entry: Entry, rules: ShardRules) -> None:
        self._root = cast(FSDPModule, entry)
        self._units = [cast(FSDPModule, module) for module in entry.modules() if isinstance(module, FSDPModule)]
        self._stage = rules.zero_stage
        self._now: dict[str, bool] = {}

    def announce(self, reduce: bool, last: bool) -> None:
        """Set the next forward and backward.

        Args:
            reduce: cut and sum its gradients over the ranks.
            last: it is the step's last.
        """
        self._turn("gradient_sync", reduce)
        self._turn("all_reduce", last)
        self._turn("last_backward", last)
        self._turn("reshard", last or self._stage == 3)

    def reshard(self) -> None:
        """Free whatever is gathered: what is updated next are the shards, and a copy would be stale."""
        for unit in self._units:
            unit.reshard()

    def _turn(self, switch: str, on: bool) -> None:
        if self._now.get(switch) == on:
            return
        self._now[switch] = on
        match switch:
            case "gradient_sync":
                self._root.set_requires_gradient_sync(on)
                self._now.pop("all_reduce", None)  # it is switched by this too
            case "all_reduce":
                self._root.set_requires_all_reduce(on)
            case "last_backward":
                self._root.set_is_last_backward(on)
            case _:
                self._root.set_reshard_after_backward(on)


@contextmanager
def explained() -> Iterator[None]:
    """Say in our words what torch says when FSDP meets a module that it cannot serve."""
    try:
        yield
    except RuntimeError as error:
        if "DTensor" in str(error):
            raise used_outside() from error
        if "being modified inplace" not in str(error):
            raise
        raise SpecError(
            "a unit of ZeRO",
            "changes its input in place, and FSDP has a hook on it that would be lost.",
            "Write x = x + ..., not x += ...; or name other modules in layout.units.",
        ) from error


def used_outside() -> SpecError:
    """A parameter was used while it was cut."""
    return SpecError(
        "the loss function, or the model,",
        "uses a parameter outside the forward pass of the module that it belongs to; there a rank has a part of it.",
        "Use it inside that module, leave its module out of layout.units (what is in no unit is whole in the loss "
        "function too), or train with ddp.",
    )


def add_twins(cut: Sharded, twins: Sequence[Twin]) -> None:
    """Have the gradient of each twin added to its first's once both are summed over ranks, before they are rounded.

    Both are the root's: FSDP lays the rows of all its parameters into one buffer, in their order.
    """
    if not twins:
        return
    root = cast(FSDPModule, cut.entry)
    spans, at = {}, 0
    for module, name, parameter in _owned(cut.entry):
        ranks = parameter.device_mesh.size(1)
        rows = -(-parameter.shape[0] // ranks)
        size = rows * math.prod(parameter.shape[1:])
        spans[id(module), name] = slice(at, at + size)
        at += size

    def merge(summed: torch.Tensor) -> None:
        for twin in twins:
            first = summed[spans[id(twin.first.module), twin.first.attribute]]
            second = summed[spans[id(twin.second.module), twin.second.attribute]]
            first.add_(second)
            second.zero_()

    root.set_all_reduce_hook(merge)


def _owned(entry: Entry) -> Iterator[tuple[nn.Module, str, Any]]:
    """The trained parameters of the root unit, in FSDP's order."""
    units = [module for module in entry.children() for module in module.modules() if isinstance(module, FSDPModule)]
    inner = {id(module) for unit in units for module in cast(nn.Module, unit).modules()}
    for module in entry.modules():
        if id(module) not in inner:
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    yield module, name, parameter
