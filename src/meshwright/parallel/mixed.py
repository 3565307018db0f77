"""Compute in another type than the masters': copies of the weights and casts of the inputs.

One precision rule holds on all layouts, that of FSDP2's MixedPrecisionPolicy: fp32 masters, forward and backward on
parameters and inputs cast to the compute type, outputs in fp32, gradients accumulated and reduced in fp32. Under data
parallelism the copies are a differentiable step in front of the model: the gradients arrive at the masters in fp32, and
all behind them (buckets, accumulation, parameters without a gradient, the optimizer) is as in full precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.nn as nn
from torch.nn.modules.batchnorm import _NormBase

from meshwright.models.casting import cast
from meshwright.parallel.entry import Parallel


@final
class Copies:
    """Copies of a model's parameters in the compute type, in the parameters' places while a step runs.

    A copy serves all microbatches of a step: its node in the graph keeps nothing, so backward may pass it again. Batch
    norms keep their masters: torch computes them on half-precision inputs with fp32 weights and statistics alone.

    Args:
        model: of fp32 masters.
        dtype: of the copies.
        apart: the copies are parameters of their own, which keep their gradients: a pipeline takes them from there.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, apart: bool = False) -> None:
        self.dtype, self.active, self._apart = dtype, False, apart
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}  # a tied parameter has several
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_floating_point() and not isinstance(module, _NormBase):
                    self._places.setdefault(parameter, []).append((module, name))

    def put(self) -> None:
        """Put fresh copies in place, unless there are some."""
        if not self.active:
            self.active = True
            with torch.enable_grad():  # a forward pass without gradients may be the first of the step
                self._place({master: self._copy(master) for master in self._places})

    def _copy(self, master: nn.Parameter) -> torch.Tensor:
        return (
            nn.Parameter(master.detach().to(self.dtype), master.requires_grad) if self._apart else master.to(self.dtype)
        )

    def take_away(self) -> None:
        """Put the masters back."""
        if self.active:
            self.active = False
            self._place({master: master for master in self._places})

    def _place(self, tensors: dict[nn.Parameter, Any]) -> None:
        for master, places in self._places.items():
            for module, name in places:
                module._parameters[name] = tensors[master]


def cast_weights(parallel: Parallel, blocks: Sequence[nn.Module], dtype: torch.dtype) -> Parallel:
    """Have a step's forward and backward passes run on copies of the weights in `dtype`.

    Args:
        parallel: of an fp32 model.
        blocks: modules whose inputs are cast, besides the model's own.
        dtype: bfloat16 or float16.
    """
    parallel.announce(False, False)  # exact mode has a parameter for each use of a tied one, and each has a copy
    copies = Copies(parallel.bare, dtype)
    parallel.settle()
    cast_around(parallel.bare, blocks, dtype, lambda: copies.active)

    def announce(reduce: bool, last: bool) -> None:
        parallel.announce(reduce, last)
        copies.put()

    def settle() -> None:
        copies.take_away()
        parallel.settle()

    return dataclasses.replace(parallel, announce=announce, settle=settle)


def cast_around(model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype, active: Callable[[], bool]) -> None:
    """Cast what the model and its blocks are called with to `dtype`, and what the model returns to fp32.

    Args:
        model: bare.
        blocks: of it.
        dtype: the compute type.
        active: whether the weights are in the compute type now.
    """
    cast_before([model, *blocks], dtype, active)

    def outputs(module: nn.Module, args: Any, output: Any) -> Any:
        return cast(output, torch.float32) if active() else None  # a loss summed in bf16 has 3 digits

    model.register_forward_hook(outputs)


def cast_before(modules: Sequence[nn.Module], dtype: torch.dtype, active: Callable[[], bool]) -> None:
    """Cast what modules are called with to `dtype`, while `active`."""

    def inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast((args, kwargs), dtype) if active() else None

    for module in set(modules):
        module.register_forward_pre_hook(inputs, with_kwargs=True)


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what the model is called with to `dtype`, that of its masters."""
    model.register_forward_pre_hook(lambda module, *inputs: cast(inputs, dtype), with_kwargs=True)
