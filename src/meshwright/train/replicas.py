"""Do the ranks still hold the same thing? Weights must, buffers may have drifted; both are compared by hash."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from meshwright.errors import RankDisagreement
from meshwright.models.anatomy import bare_name, batch_norms, parameters_in_order
from meshwright.parallel.leaves import local
from meshwright.parallel.mesh import REPLICAS
from meshwright.spec.nearest import first_of

NamedTensors = Sequence[tuple[str, torch.Tensor]]


def disagreeing(named: NamedTensors, world_size: int) -> list[str]:
    """Names of tensors that are not bit-equal on all ranks that have the same part of them; collective.

    One 64-bit hash a tensor travels, so a check costs one pass over the weights. The answer is the same everywhere.
    """
    if world_size == 1 or not named:
        return []
    named = [(name, tensor) for name, tensor in named if tensor.numel()]
    whole = [(name, tensor) for name, tensor in named if not isinstance(tensor, DTensor)]
    cut = [(name, tensor) for name, tensor in named if isinstance(tensor, DTensor)]
    names = _differing(whole, None)
    if cut:
        names += _differing(cut, cut[0][1].device_mesh.get_group(REPLICAS))
    return names


def _differing(named: NamedTensors, group: dist.ProcessGroup | None) -> list[str]:
    """Names of what differs within some group; all ranks of the world call it."""
    if not named:
        return []
    parts = [local(tensor) for _, tensor in named]
    mine = torch.stack([_hash(part) for part in parts])
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    differs = (low != high).to(torch.int64)
    if group is not None:  # other parts are compared in other groups
        dist.all_reduce(differs, dist.ReduceOp.MAX)
    return [name for (name, _), bad in zip(named, differs.tolist(), strict=True) if bad]


def _hash(part: torch.Tensor) -> torch.Tensor:
    """64 bits on the host; 0 of a part without rows, as a rank may have."""
    if not part.numel():
        return torch.zeros((), dtype=torch.int64)
    return torch.hash_tensor(_plain(part)).view(torch.int64).cpu().reshape(())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a type that can be hashed: bytes, where torch has no kernel for its own."""
    known = tensor.is_floating_point() or tensor.dtype in (torch.int64, torch.int32, torch.uint8, torch.bool)
    return tensor if known else tensor.contiguous().reshape(-1).view(torch.uint8)


def require_equal_weights(model: nn.Module, world_size: int, when: str) -> None:
    """Stop if replicas differ.

    Args:
        model: bare module.
        world_size: ranks.
        when: for the message, as `before the first step`.

    Raises:
        RankDisagreement: naming the parameters.
    """
    names = disagreeing(parameters_in_order(model), world_size)
    if names:
        raise RankDisagreement(
            f"weights {when}",
            f"differ between ranks: {first_of(names)}.",
            "A function that builds the model must give the same weights on every rank: draw random numbers from "
            "torch's, numpy's or Python's global generators alone, which are seeded for it.",
        )


def reconcile_buffers(model: nn.Module, world_size: int) -> list[str]:
    """Average the running statistics of batch norms over the ranks, and name the other buffers that differ; collective.

    Each rank's statistics come from its own samples; their mean is what evaluation and checkpoints use. Any other
    buffer that differs is a fault of the model (or a count of its own calls), and rank 0's is what checkpoints hold.
    A batch norm's own count of calls is no fault: a rank without rows in an epoch's last step makes one less. What is
    equal everywhere is left as it is: a mean of equal numbers may round to another one.
    """
    if world_size == 1:
        return []
    norms = set(batch_norms(model))
    averaged: list[tuple[str, torch.Tensor]] = []
    others: list[tuple[str, torch.Tensor]] = []
    for name, buffer in ((bare_name(name), buffer) for name, buffer in model.named_buffers()):
        if name.rpartition(".")[0] not in norms:
            others.append((name, buffer))
        elif buffer.is_floating_point():
            averaged.append((name, buffer))
    apart = set(disagreeing(averaged, world_size))
    for name, buffer in averaged:
        if name in apart:
            dist.all_reduce(buffer)
            buffer.div_(world_size)
    return disagreeing(others, world_size)
