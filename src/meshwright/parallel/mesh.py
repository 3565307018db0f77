"""A Layout made real: this rank's place on each axis. A value that is passed on, never a global."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.errors import MeshMismatch
from meshwright.spec.layout import Layout


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
