"""Data parallelism in bf16 or fp16: FSDP2 with nothing cut.

One precision rule holds on all layouts: fp32 masters, compute on parameters and inputs cast as FSDP2's
MixedPrecisionPolicy casts them, gradients reduced in fp32. Plain data parallelism keeps it by using the same code on a
mesh (dp_replicate, 1): each "shard" is the whole fp32 master.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from meshwright.parallel.entry import Entry, Parallel
from meshwright.parallel.mesh import Mesh


def apply_mixed(model: nn.Module, mesh: Mesh, blocks: Sequence[nn.Module], compute: torch.dtype) -> Parallel:
    """Cast parameters to `compute` as they are used, and sum fp32 gradients over the data-parallel ranks.

    Args:
        model: fp32, equal on all ranks.
        mesh: pure data parallel.
        blocks: units whose casts are made one after the other.
        compute: bf16 or fp16.
    """
    degree = mesh.layout.dp_degree
    device_mesh = init_device_mesh(mesh.device.type, (degree, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in [*blocks, model]:
        unit = fully_shard(module, mesh=device_mesh, mp_policy=policy, reshard_after_forward=False)
        # The loss is divided by the count of the whole step, so gradients are summed, not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    root = cast(FSDPModule, model)

    def set_sync(on: bool) -> None:
        root.set_is_last_backward(on)
        root.set_reshard_after_backward(on)  # the cast copies stay until the step's last microbatch
        root.set_requires_gradient_sync(on)

    return Parallel(model, Entry(model), gradient_scale=1.0, set_sync=set_sync, local_gradients=False)
