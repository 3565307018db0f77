"""Where a trace runs: a copy of the user's module and batch without memory, and the kernels that it is to be read for.

    cuda    on the meta device, with what CUDA's kernels keep (trace_kernels.py)
    cpu     fake tensors on the CPU: what the CPU's kernels keep
    real    real tensors on the CPU, for a module that looks at the values of its tensors

The user's module is never touched. The copy has its parameters in the compute type, as a rank has them while it
computes, and casts inputs and outputs where parallel/mixed.py and parallel/fsdp.py have them cast.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Literal, final

import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase

from meshwright.errors import SpecError
from meshwright.models.casting import COMPUTE_DTYPES, cast
from meshwright.models.trace_kernels import cuda_kernels, grouped_products
from meshwright.models.trace_memory import tensors_in

Place = Literal["cuda", "cpu", "real"]


@final
class Stage:
    """Makes copies of modules and batches, and is entered around all that runs on them.

    Args:
        place: cuda | cpu | real.
        compute: fp32 | bf16 | fp16 | fp64.
    """

    def __init__(self, place: Place, compute: str) -> None:
        self.place, self.compute = place, compute
        # allow_non_fake_inputs: modules may hold tensors that are neither parameters nor buffers
        self._fake = FakeTensorMode(allow_non_fake_inputs=True) if place == "cpu" else None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, new tensors are made at this place, and operators keep what they would keep there."""
        with ExitStack() as stack:
            stack.enter_context(_packing_not_looked_for())
            stack.enter_context(grouped_products())
            if self.place == "cuda":
                stack.enter_context(cuda_kernels())
                stack.enter_context(torch.device("meta"))
            stack.enter_context(self._fake or nullcontext())
            yield

    def module(self, model: nn.Module) -> nn.Module:
        """A copy of a model, in training mode or not as it is, with parameters in the compute type; ties hold.

        Raises:
            SpecError: it cannot be copied.
        """
        memo: dict[int, Any] = {}
        half = COMPUTE_DTYPES[self.compute] if self.compute in ("bf16", "fp16") else None
        for module in model.modules():
            master = half if half is not None and not isinstance(module, _NormBase) else self._master
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in memo:
                    made = nn.Parameter(self._like(parameter, master), parameter.requires_grad)
                    memo[id(parameter)] = made
            loose = {name: value for name, value in vars(module).items() if name not in _REGISTRIES}
            for tensor in [*module._buffers.values(), *tensors_in(loose)]:
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = self._like(tensor, self._master)
        try:
            return copy.deepcopy(model, memo)
        except Exception as error:
            rule = f"cannot be copied, and a trace works on a copy: {type(error).__name__}: {error}."
            raise SpecError(f"the model {type(model).__name__}", rule, "Give it a __deepcopy__ of its own.") from error

    def batch(self, batch: Any) -> Any:
        """A copy of a batch."""
        return moved(batch, partial(self._like, dtype=None))

    @property
    def _master(self) -> torch.dtype:
        return torch.float64 if self.compute == "fp64" else torch.float32

    def _like(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """A tensor of this place with the same sizes and strides; floating-point ones in `dtype`, if it is given."""
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if self.place == "real":
            return tensor.detach().clone().to(wanted)
        make = partial(torch.empty_strided, tensor.size(), tensor.stride(), dtype=wanted)
        with self._fake or nullcontext():
            return make(device="meta" if self.place == "cuda" else "cpu")


_REGISTRIES: Final = ("_parameters", "_buffers", "_modules")


def moved(values: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch with its tensors moved; as train/loader.py moves one to its device."""
    if isinstance(values, torch.Tensor):
        return move(values)
    if isinstance(values, dict):
        other = copy.copy(values)  # of its own class, with whatever else that holds
        other.update((name, moved(value, move)) for name, value in values.items())
        return other
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(moved(value, move) for value in values))
    if isinstance(values, list | tuple):
        return type(values)(moved(value, move) for value in values)
    if isinstance(getattr(values, "data", None), dict):
        boxed: Any = copy.copy(values)  # a dict in a class of its own, as the batches of transformers
        boxed.data = moved(values.data, move)
        return boxed
    return values


def cast_around(model: nn.Module, blocks: Sequence[nn.Module], compute: str) -> None:
    """Cast what the model and its blocks are called with, and what the model returns, as a rank does."""
    if compute == "fp32":
        return
    dtype = COMPUTE_DTYPES[compute]

    def inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast((args, kwargs), dtype)

    def outputs(module: nn.Module, args: Any, output: Any) -> Any:
        return cast(output, torch.float32)

    for module in [model, *(blocks if compute != "fp64" else ())]:
        module.register_forward_pre_hook(inputs, with_kwargs=True)
    if compute != "fp64":
        model.register_forward_hook(outputs)


@contextmanager
def _packing_not_looked_for() -> Iterator[None]:
    """Keep transformers from reading off the positions whether rows are packed, if it has been imported.

    It looks at values that a tensor without memory does not have; positions that a model counts itself say no.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return
    before = masking.find_packed_sequence_indices
    masking.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = before
