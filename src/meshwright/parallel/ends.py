"""The end of a unit's backward pass, a moment before FSDP sums its gradients over the ranks.

FSDP sums whatever gradients a unit has when the backward pass of one of its calls is over. That is not enough where

* a parameter has none because this rank's samples did not use it: another rank, whose samples did, would add up
  something else in its place. It gets zeros here. (torch 2.13 can fill them in by itself, but in another type than the
  sums of earlier microbatches have, and too early for the next kind.)
* a unit is called twice, and has its gradients only when both calls are over: what earlier microbatches left must not
  be summed alone at the end of the first, or it would be rounded once more than on other layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.parallel.taps import Place


class _Passage(torch.autograd.Function):
    """Hands tensors on; calls `end` once their gradients have come back."""

    @staticmethod
    def forward(ctx: Any, end: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.end = end
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.end()
        return None, *gradients


@dataclass(slots=True)
class Wanted:
    """What the current microbatch wants of FSDP: that gradients are cut and summed, and summed over replicas too."""

    reduce: bool = False
    last: bool = False


@final
class UnitEnd:
    """The calls of one unit in a microbatch, and their ends.

    Args:
        unit: sharded.
        places: of its trained parameters.
        ended: called when all calls of a microbatch are over.
    """

    def __init__(self, unit: nn.Module, places: Sequence[Place], ended: Callable[[], None]) -> None:
        self._unit, self._places, self._ended = unit, places, ended
        self._open = self._calls = 0
        self._is_over = False

    def watch(self, wanted: Wanted) -> None:
        """Have its calls seen, behind FSDP's own hook, so that their ends come before FSDP's."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
                return None
            flat, spec = tree_flatten((args, kwargs))
            at = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and x.requires_grad]
            if not at:
                return None  # as FSDP does then: it is over with the backward pass as a whole
            self._open, self._calls = self._open + 1, self._calls + 1
            passed = _Passage.apply(lambda: self._end(wanted), *(flat[i] for i in at))  # type: ignore[no-untyped-call]
            for i, tensor in zip(at, passed, strict=True):
                flat[i] = tensor
            return tree_unflatten(flat, spec)

        self._unit.register_forward_pre_hook(torch.compiler.disable(enter), with_kwargs=True)  # type: ignore[no-untyped-call]

    def _end(self, wanted: Wanted) -> None:
        self._open -= 1
        if self._calls > 1:
            self._turn(wanted, is_over=self._open == 0)
        if self._open == 0:
            self._fill()

    def _turn(self, wanted: Wanted, *, is_over: bool) -> None:
        """Let FSDP sum the unit's gradients as is wanted, or not yet."""
        sharded = cast(FSDPModule, self._unit)
        sharded.set_requires_gradient_sync(wanted.reduce and is_over, recurse=False)
        sharded.set_requires_all_reduce(wanted.last and is_over, recurse=False)

    def close(self, wanted: Wanted) -> None:
        """The pass as a whole is over; what is still open led nowhere, or is of a call without a backward."""
        if self._open:
            self._turn(wanted, is_over=True)
        if not self._is_over:
            self._fill()
        self._open = self._calls = 0
        self._is_over = False

    def _fill(self) -> None:
        """Zeros for what has no gradient."""
        self._is_over = True
        self._ended()
        if any(isinstance(module._parameters[name], DTensor) for module, name, _ in self._places):
            cast(FSDPModule, self._unit).unshard()  # its output led nowhere; other ranks may have gone on from theirs
        for module, name, _ in self._places:
            parameter: Any = module._parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@final
class Ends:
    """The ends of all units, the root's last."""

    def __init__(self) -> None:
        self._units: list[UnitEnd] = []
        self.wanted = Wanted()

    def watch(self, unit: nn.Module, places: Sequence[Place], ended: Callable[[], None]) -> None:
        """Add a unit, once FSDP has it."""
        self._units.append(UnitEnd(unit, places, ended))
        self._units[-1].watch(self.wanted)

    def before_backward(self, objective: torch.Tensor) -> torch.Tensor:
        """What backward shall start from: so that what is still open is filled before FSDP ends the pass."""
        if self._units:
            objective = objective.clone()  # its hook runs before those that FSDP has on the tensor itself
            objective.register_hook(self._queue)  # type: ignore[no-untyped-call]
        return objective

    def _queue(self, gradient: torch.Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._rest)

    def _rest(self) -> None:
        for unit in self._units:
            unit.close(self.wanted)
