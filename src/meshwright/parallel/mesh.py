"""A Layout made real: this rank's place on each axis, and the groups that it talks in. A value that is passed on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import MeshMismatch
from meshwright.spec.layout import AXES, Layout
from meshwright.spec.nearest import divisors

REPLICAS: Final = "dp_replicate"
SHARDS: Final = "dp_shard"

Group = Any
"""A torch.distributed.ProcessGroup, which the stubs know by another name; None where an axis has one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of one rank, each of the ranks that differ from it on that axis alone.

    Attributes:
        data: dp_replicate x dp_shard, where dp_shard cuts.
        replicas: along dp_replicate, where dp_shard cuts.
        shards: along dp_shard.
        dp: both data-parallel axes together.
        tp: along tp.
        tensor: the same as a mesh.
        copies: by number c, the c neighbours along tp that hold the same part of a tensor cut in tp / c.
        pp: along pp.
        ends: the first and the last stage of it.
    """

    data: DeviceMesh | None = None
    replicas: Group = None
    shards: Group = None
    dp: Group = None
    tp: Group = None
    tensor: DeviceMesh | None = None
    copies: Mapping[int, Group] = field(default_factory=dict)
    pp: Group = None
    ends: Group = None


@dataclass(frozen=True, slots=True)
class Mesh:
    """Where this rank stands.

    Attributes:
        layout: the degrees.
        rank: this rank, in range(layout.world_size).
        device: where its tensors live.
        groups: that it talks in.
    """

    layout: Layout
    rank: int
    device: torch.device
    groups: Groups = Groups()

    @property
    def dp_rank(self) -> int:
        """Place along the data-parallel axes, in range(layout.dp_degree)."""
        return self.layout.dp_rank(self.rank)

    @property
    def tp_rank(self) -> int:
        """Place along tp."""
        return self.layout.coordinates(self.rank)["tp"]

    @property
    def pp_rank(self) -> int:
        """Place along pp."""
        return self.layout.coordinates(self.rank)["pp"]

    @property
    def is_alone(self) -> bool:
        """Is there no other rank?"""
        return self.layout.world_size == 1


def make_groups(layout: Layout, rank: int, device: torch.device, timeout_s: float) -> Groups:
    """Make the groups of all ranks; every rank calls it, and all make them in the same order.

    Made one by one, and not by init_device_mesh, whose groups wait half an hour for a rank that does not come.
    """
    if layout.world_size == 1:
        return Groups()
    table = torch.arange(layout.world_size).reshape([getattr(layout, axis) for axis in AXES])
    pp, replicate, shard, tp = table.shape
    make = _Maker(rank, timedelta(seconds=timeout_s))
    by_data = table.permute(0, 3, 1, 2)  # (pp, tp, dp_replicate, dp_shard)
    data = replicas = shards = None
    if shard > 1:
        replicas = make(by_data.transpose(2, 3).reshape(-1, replicate).tolist(), alone=True)
        shards = make(by_data.reshape(-1, shard).tolist(), alone=True)
        mine = next(lines for lines in by_data.reshape(-1, replicate, shard) if rank in lines)
        data = DeviceMesh.from_group([replicas, shards], device.type, mesh=mine, mesh_dim_names=(REPLICAS, SHARDS))
    rows = table.reshape(-1, tp)
    tensor_group = make(rows.tolist())
    along = table.permute(1, 2, 3, 0).reshape(-1, pp)
    return Groups(
        data=data,
        replicas=replicas,
        shards=shards,
        dp=make(by_data.reshape(-1, replicate * shard).tolist()),
        tp=tensor_group,
        tensor=DeviceMesh.from_group(tensor_group, device.type, mesh_dim_names=("tp",)) if tensor_group else None,
        copies={c: make(rows.reshape(-1, c).tolist()) for c in divisors(tp) if 1 < c < tp} | {tp: tensor_group},
        pp=make(along.tolist()),
        ends=make([[line[0], line[-1]] for line in along.tolist()]) if pp > 1 else None,
    )


class _Maker:
    """Makes the groups of one axis, and gives this rank's."""

    def __init__(self, rank: int, timeout: timedelta) -> None:
        self._rank, self._timeout = rank, timeout

    def __call__(self, lines: Sequence[Iterable[int]], *, alone: bool = False) -> Group:
        """The group of the line that holds this rank; None for lines of one rank, unless groups of one are wanted."""
        found = None
        for line in map(list, lines):
            if len(line) == dist.get_world_size():
                found = dist.group.WORLD  # there is one already
            elif len(line) > 1 or alone:
                made = dist.new_group(line, timeout=self._timeout)
                found = made if self._rank in line else found
        return found


def make_mesh(layout: Layout, rank: int, world_size: int, device: torch.device, timeout_s: float = 50.0) -> Mesh:
    """Place a rank on a layout; collective.

    Raises:
        MeshMismatch: another number of processes runs than the layout has ranks.
    """
    if world_size != layout.world_size:
        raise MeshMismatch(
            f"layout {layout.word}",
            f"has {layout.world_size} ranks (pp x dp_replicate x dp_shard x tp), and {world_size} processes run.",
            f"Start {layout.world_size} processes, or set layout.dp_replicate = {world_size}.",
        )
    return Mesh(layout, rank, device, make_groups(layout, rank, device, timeout_s))
