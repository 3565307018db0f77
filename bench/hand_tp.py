"""Tensor and sequence parallelism by hand, for hand_loop.py: torch's own styles, as its tutorial puts them together.

The residual stream is cut along the sequence; norms work on their part, attention and feed-forward gather it and leave
a part of their sum; embedding and head are cut by the vocabulary, and so is the loss (`loss_parallel`). torch's styles
cut a matrix wherever the number of ranks says, so heads must divide by it.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshwright.spec.layout import Layout


def cut(bare: torch.nn.Module, layout: Layout) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (layout.tp,), mesh_dim_names=("tp",))
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(bare, mesh, ends)
    for block in cast(torch.nn.ModuleList, bare.blocks):
        gathered = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
        plan = {
            "norm1": SequenceParallel(),
            "attention": PrepareModuleInput(**gathered),
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "norm2": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
            "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return bare
