"""Data parallelism: DistributedDataParallel, entered at the end of the forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.models.anatomy import parameters_in_order
from meshwright.parallel.entry import Entry, Parallel
from meshwright.parallel.gradients import Replicated
from meshwright.parallel.kin import Kin
from meshwright.parallel.leaves import Leaf
from meshwright.parallel.mesh import Mesh


def apply_ddp(model: nn.Module, mesh: Mesh, may_skip_parameters: bool, kin: Sequence[Kin] | None = None) -> Parallel:
    """Average gradients over the data-parallel ranks in buckets, while backward still runs.

    DDP reduces the gradients of what went through its `forward`, and silently no others. So the objective goes through
    it last, unchanged: whatever a loss function or a user's own loop called on the way there has then been seen.

    Args:
        model: equal on all ranks.
        mesh: whose dp_replicate it is.
        may_skip_parameters: the model may leave parameters without a gradient, which DDP must then look for.
        kin: of each trained parameter, where tp has cut the model.
    """
    entry = Entry(model)
    leaves = [Leaf(name, p, p) for name, p in parameters_in_order(model) if p.requires_grad]
    if mesh.layout.dp_degree == 1 or not leaves:
        return Parallel(model, entry, Replicated(leaves, 1.0, kin), announce=lambda reduce, last: None)
    # torch 2.13 renamed broadcast_buffers and warns of the old name; 2.11 knows only that one.
    names = inspect.signature(DistributedDataParallel).parameters
    no_broadcast: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False
    }
    ddp = DistributedDataParallel(
        entry,
        # Replicas are equal by construction and checked; DDP's own broadcast would hide that they were not.
        init_sync=False,
        process_group=mesh.groups.dp,
        gradient_as_bucket_view=True,
        find_unused_parameters=may_skip_parameters,
        **no_broadcast,
    )

    def announce(reduce: bool, last: bool) -> None:
        ddp.require_backward_grad_sync = reduce

    def before_backward(objective: torch.Tensor) -> torch.Tensor:
        passed: torch.Tensor = ddp(_objective, objective)
        return passed

    # DDP averages; the step divides by the count of the whole batch itself.
    gradients = Replicated(leaves, float(mesh.layout.dp_degree), kin, counts=mesh.dp_rank == 0)
    return Parallel(model, entry, gradients, announce, before_backward)


def _objective(model: nn.Module, objective: torch.Tensor) -> torch.Tensor:
    return objective
