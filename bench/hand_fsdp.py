"""ZeRO by hand, for hand_loop.py: FSDP2 with the flags that one who knows it sets.

    stage   parameters after forward      gradients are reduced           parameters after backward
    1       stay                          at the last microbatch          stay, but for the last
    2       stay                          at each                         stay, but for the last
    3       are freed, but the root's     at each                         are freed

Under HSDP the shards are summed over the replicas at the last microbatch alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from meshwright.spec.layout import Layout


def cut(bare: torch.nn.Module, layout: Layout) -> torch.nn.Module:
    names = ("dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", (layout.dp_replicate, layout.dp_shard), mesh_dim_names=names)
    mesh = mesh if layout.dp_replicate > 1 else mesh["dp_shard"]
    frees = layout.zero_stage == 3
    for block in cast(torch.nn.ModuleList, bare.blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=frees)
    # FSDP2's own choice for the root is to keep it: backward begins with its parameters.
    fully_shard(bare, mesh=mesh, reshard_after_forward=None if frees else False)
    return bare


def announce(model: torch.nn.Module, layout: Layout, last: bool) -> None:
    root = cast(FSDPModule, model)
    root.set_is_last_backward(last)
    # Each of these walks all modules, so only where it changes something.
    if layout.zero_stage == 1:
        root.set_requires_gradient_sync(last)
    if layout.zero_stage < 3:
        root.set_reshard_after_backward(last)
    if layout.dp_replicate > 1:
        root.set_requires_all_reduce(last)


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Each rank its own shards, as torch's distributed checkpoints are written."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
