"""What the optimizer trains: this rank's part of each parameter, as a plain tensor that shares its memory.

A plain tensor costs an optimizer less than a DTensor, and whoever lengthens its memory to whole vectors changes nothing
for the module. An elementwise update of the part is the part of an update of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.errors import SpecError

LANES: Final = 64
"""Elements that no vector unit has more of: fp32 in AVX-512 has 16, and kernels unroll up to four of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One trainable parameter, and what the optimizer has in its place.

    Attributes:
        name: of the parameter, in the bare module.
        parameter: the module's; a DTensor where ZeRO cuts it.
        leaf: the optimizer's: the parameter itself, or this rank's part of it, which may be flat and longer.
    """

    name: str
    parameter: nn.Parameter
    leaf: nn.Parameter

    def part(self, state: torch.Tensor) -> torch.Tensor:
        """Optimizer state of the leaf in the shape of this rank's part; a scalar as it is."""
        here = local(self.parameter)
        state = local(state)
        if state.ndim == 0 or state.shape == here.shape or state.shape != local(self.leaf).shape:
            return state
        return state.reshape(-1)[: here.numel()].view(here.shape)

    def laid(self, part: torch.Tensor) -> torch.Tensor:
        """What `part` gave, in the shape of the leaf again: optimizer state as the optimizer wants it."""
        if part.shape != local(self.parameter).shape:
            return part
        if isinstance(self.leaf, DTensor):
            mesh, placements = self.leaf.device_mesh, self.leaf.placements
            shape, stride = self.leaf.shape, self.leaf.stride()
            return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
        if part.shape == self.leaf.shape:
            return part
        flat = torch.zeros(self.leaf.shape, dtype=part.dtype, device=part.device)
        flat[: part.numel()] = part.reshape(-1)
        return flat


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be distributed, detached."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def require_own_memory(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that share memory and are not one parameter: a cut, or a longer memory, would part them.

    Raises:
        SpecError: naming two.
    """
    spans = []
    for name, parameter in named:
        last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        if parameter.numel() and not parameter.is_meta:
            start = parameter.data_ptr()
            spans.append((start, start + (last + 1) * parameter.itemsize, name))
    spans.sort()
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            raise SpecError(
                f"parameters {one} and {other}",
                "share memory, and are two parameters; ZeRO and exact mode would part them.",
                "Make them one, as in b.weight = a.weight, or let each have its own.",
            )


def plain_leaf(name: str, parameter: nn.Parameter) -> Leaf:
    """The parameter itself, or its part as a plain tensor."""
    is_cut = isinstance(parameter, DTensor)
    return Leaf(name, parameter, nn.Parameter(local(parameter)) if is_cut else parameter)


def padded_leaf(name: str, parameter: nn.Parameter) -> Leaf:
    """This rank's part as a flat tensor of whole vectors, zeros behind it.

    Fused kernels finish a tensor with a scalar tail that rounds differently, so where ZeRO cuts would show in the last
    bit. Nothing is copied for it but what the allocator moves: the memory of the part is made longer where it is.
    """
    here = local(parameter)
    if not isinstance(parameter, DTensor) and not _owns_its_memory(parameter):
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        here = local(parameter)
    storage, n = here.untyped_storage(), here.numel()
    length = _whole(max(storage.nbytes() // here.itemsize, 1))
    storage.resize_(length * here.itemsize)
    flat = torch.empty(0, dtype=here.dtype, device=here.device).set_(storage, 0, (length,), (1,))
    flat[n:].zero_()
    return Leaf(name, parameter, nn.Parameter(flat))


def padded_gradient(leaf: nn.Parameter, part: torch.Tensor, factor: float) -> torch.Tensor:
    """`part` x `factor` in the shape of a padded leaf."""
    n = part.numel()
    gradient = torch.empty_like(leaf)
    torch.mul(part.reshape(-1), factor, out=gradient[:n])
    gradient[n:].zero_()
    return gradient


def _owns_its_memory(parameter: nn.Parameter) -> bool:
    storage = parameter.untyped_storage()
    alone = storage.nbytes() == parameter.numel() * parameter.itemsize
    return alone and parameter.is_contiguous() and storage.resizable()


def _whole(n: int) -> int:
    return -(-n // LANES) * LANES


def whole(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """All ranks' parts put together; collective where `like` is cut. Anything else is whole already.

    Args:
        part: this rank's part of a tensor that is cut as `like` is.
        like: a parameter.
    """
    if not isinstance(like, DTensor) or part.ndim == 0:
        return part
    cut = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return cut.full_tensor()


def rows_here(like: torch.Tensor) -> slice:
    """Which rows of the whole tensor this rank has; all of them if nothing is cut."""
    if not isinstance(like, DTensor):
        return slice(None)
    axis = next((i for i, placement in enumerate(like.placements) if isinstance(placement, Shard)), None)
    if axis is None:
        assert all(isinstance(placement, Replicate) for placement in like.placements), like.placements
        return slice(None)
    # As torch.chunk: every rank has as many rows as the first, until they run out.
    each = -(-like.shape[0] // like.device_mesh.size(axis))
    coordinate = like.device_mesh.get_local_rank(axis)
    start = min(each * coordinate, like.shape[0])
    return slice(start, min(start + each, like.shape[0]))
