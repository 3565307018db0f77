"""A Layout made real: this rank's place on each axis. A value that is passed on, never a global."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import MeshMismatch
from meshwright.spec.layout import Layout

REPLICAS: Final = "dp_replicate"
SHARDS: Final = "dp_shard"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Where this rank stands.

    Attributes:
        layout: the degrees.
        rank: this rank, in range(layout.world_size).
        device: where its tensors live.
    """

    layout: Layout
    rank: int
    device: torch.device

    @property
    def dp_rank(self) -> int:
        """Place along the data-parallel axes, in range(layout.dp_degree)."""
        return self.layout.dp_rank(self.rank)


def data_parallel_mesh(mesh: Mesh, timeout_s: float) -> DeviceMesh:
    """The two data-parallel axes as a DeviceMesh of new groups; every rank calls it, in the same order.

    Made of groups, and not by init_device_mesh, whose groups wait half an hour for a rank that does not come.
    """
    replicate, shard = mesh.layout.dp_replicate, mesh.layout.dp_shard
    assert mesh.layout.world_size == replicate * shard, "tp and pp have no mesh yet"
    table = torch.arange(replicate * shard).reshape(replicate, shard)
    timeout = timedelta(seconds=timeout_s)
    groups = []
    for rows in (table.T, table):  # the groups along dp_replicate, then those along dp_shard
        made = [dist.new_group(row.tolist(), timeout=timeout) for row in rows]
        groups.append(next(group for row, group in zip(rows, made, strict=True) if mesh.rank in row.tolist()))
    return DeviceMesh.from_group(groups, mesh.device.type, mesh=table, mesh_dim_names=(REPLICAS, SHARDS))


def make_mesh(layout: Layout, rank: int, world_size: int, device: torch.device) -> Mesh:
    """Place a rank on a layout.

    Raises:
        MeshMismatch: another number of processes runs than the layout has ranks.
    """
    if world_size != layout.world_size:
        raise MeshMismatch(
            f"layout {layout.word}",
            f"has {layout.world_size} ranks (pp x dp_replicate x dp_shard x tp), and {world_size} processes run.",
            f"Start {layout.world_size} processes, or set layout.dp_replicate = {world_size}.",
        )
    return Mesh(layout, rank, device)
