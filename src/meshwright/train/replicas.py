"""Do the ranks still hold the same thing? Weights must, buffers may have drifted; both are compared by hash."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn

from meshwright.errors import RankDisagreement
from meshwright.models.anatomy import bare_name, batch_norms, parameters_in_order
from meshwright.spec.nearest import first_of
from meshwright.train.step import local

NamedTensors = Sequence[tuple[str, torch.Tensor]]


def disagreeing(named: NamedTensors, world_size: int) -> list[str]:
    """Names of tensors that are not bit-equal on all ranks; collective, the same answer everywhere.

    One 64-bit hash a tensor travels, so a check costs one pass over the weights.
    """
    if world_size == 1 or not named:
        return []
    named = [(name, local(tensor.detach())) for name, tensor in named if tensor.numel()]
    mine = torch.stack([torch.hash_tensor(_plain(tensor)).view(torch.int64).cpu().reshape(()) for _, tensor in named])
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return [name for (name, _), same in zip(named, (low == high).tolist(), strict=True) if not same]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a type that can be hashed: bytes, where torch has no kernel for its own."""
    known = tensor.is_floating_point() or tensor.dtype in (torch.int64, torch.int32, torch.uint8, torch.bool)
    return tensor if known else tensor.contiguous().reshape(-1).view(torch.uint8)


def require_equal_weights(model: nn.Module, world_size: int, when: str) -> None:
    """Stop if replicas differ.

    Args:
        model: bare module, whole on every rank.
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
    A batch norm's own count of calls is no fault: a rank without rows in an epoch's last step makes one less.
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
    for _, buffer in averaged:
        dist.all_reduce(buffer)
        buffer.div_(world_size)
    return disagreeing(others, world_size)
