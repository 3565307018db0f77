"""Everything that ranks of a tensor-parallel group say to each other: DTensor redistributions of plain tensors.

Parameters and activations are plain local tensors; a DTensor lives only inside these functions. Each says what forward
and backward do. Activations are (..., s, d): places along the dimension before the last, features along the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


@dataclass(frozen=True, slots=True)
class TensorAxis:
    """The ranks over which matrices are cut, as one of them sees them.

    Attributes:
        rank: place of this rank among them.
        size: how many there are.
        mesh: of one dimension, named "tp".
    """

    rank: int
    size: int
    mesh: DeviceMesh

    def __deepcopy__(self, memo: object) -> TensorAxis:
        """A copied module talks to the same ranks."""
        return self


def gather_sequence(x: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """A part of the sequence to all of it: all-gather; backward sums and scatters (reduce-scatter)."""
    part = DTensor.from_local(x, axis.mesh, [Shard(x.ndim - 2)], run_check=False)
    return _local(part.redistribute(placements=[Replicate()]), Partial())


def scatter_sum(x: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """Addends of the whole sequence to a part of their sum: reduce-scatter; backward gathers (all-gather)."""
    place = Shard(x.ndim - 2)
    addend = DTensor.from_local(x, axis.mesh, [Partial()], run_check=False)
    return _local(addend.redistribute(placements=[place]), place)


def enter(x: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """What all ranks have into a matrix that is cut by rows: as it is; backward sums (all-reduce)."""
    return _local(DTensor.from_local(x, axis.mesh, [Replicate()], run_check=False), Partial())


def add_up(x: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """Addends to their sum on all ranks: all-reduce; backward as it is."""
    addend = DTensor.from_local(x, axis.mesh, [Partial()], run_check=False)
    return _local(addend.redistribute(placements=[Replicate()]), Replicate())


def join_features(x: torch.Tensor, width: int, axis: TensorAxis) -> torch.Tensor:
    """Parts of the features, which may be uneven, to all `width` of them: all-gather; backward cuts."""
    shape = torch.Size((*x.shape[:-1], width))
    stride = torch.empty(shape, device="meta").stride()
    x = x.contiguous()
    part = DTensor.from_local(x, axis.mesh, [Shard(x.ndim - 1)], run_check=False, shape=shape, stride=stride)
    return _local(part.redistribute(placements=[Replicate()]), Replicate())


def split_features(x: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """All features to this rank's part: cuts; backward joins (all-gather)."""
    place = Shard(x.ndim - 1)
    whole = DTensor.from_local(x, axis.mesh, [Replicate()], run_check=False)
    return _local(whole.redistribute(placements=[place]), place)


def reduced(x: torch.Tensor, axis: TensorAxis, how: str = "sum") -> torch.Tensor:
    """The sum or the greatest ("max") over the ranks, without a gradient: all-reduce."""
    addend = DTensor.from_local(x, axis.mesh, [Partial(how)], run_check=False)
    return addend.redistribute(placements=[Replicate()]).to_local()


def _local(x: DTensor, gradient: Placement) -> torch.Tensor:
    """The local tensor; its gradient comes back placed so."""
    return x.to_local(grad_placements=[gradient])
