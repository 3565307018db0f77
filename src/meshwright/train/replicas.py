"""Do the ranks still hold the same thing? Weights must, buffers may have drifted; both are compared by hash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from meshwright.errors import RankDisagreement
from meshwright.models.anatomy import bare_name, batch_norms, parameters_in_order
from meshwright.parallel.leaves import local
from meshwright.parallel.mesh import Mesh
from meshwright.spec.nearest import divisors, first_of

NamedTensors = Sequence[tuple[str, torch.Tensor]]


def disagreeing(
    named: NamedTensors, mesh: Mesh, copies: Mapping[str, int] | None = None, *, whole: bool = False
) -> list[str]:
    """Names of tensors that are not bit-equal on all ranks that have the same part of them; collective.

    One 64-bit hash a tensor travels, so a check costs one pass over the weights. The answer is the same everywhere.

    Args:
        named: tensors of this rank.
        mesh: the ranks.
        copies: by name, on how many neighbours along tp a tensor is the same; 1 for what is not named.
        whole: nothing is cut yet: all ranks have the same.
    """
    if mesh.is_alone:
        return []
    named = [(name, tensor) for name, tensor in named if tensor.numel()]
    if whole:
        return _differing(named, dist.group.WORLD)
    groups, tp = mesh.groups, mesh.layout.tp
    comparisons: list[tuple[NamedTensors, Any]] = [
        ([(name, tensor) for name, tensor in named if not isinstance(tensor, DTensor)], groups.dp),
        ([(name, tensor) for name, tensor in named if isinstance(tensor, DTensor)], groups.replicas),
    ]
    for count in [count for count in divisors(tp) if count > 1]:
        alike = [(name, tensor) for name, tensor in named if (copies or {}).get(name, 1) == count]
        comparisons.append((alike, groups.copies[count]))
    names = {name for among, group in comparisons for name in _differing(among, group)}
    return sorted(_on_any_rank(names, mesh))


def _on_any_rank(names: set[str], mesh: Mesh) -> set[str]:
    """What differs in some group must be known in all."""
    found = torch.tensor(float(bool(names)), device=mesh.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if not found.item():
        return set()
    everyone: list[set[str]] = [set() for _ in range(mesh.layout.world_size)]
    dist.all_gather_object(everyone, names)
    return set().union(*everyone)


def _differing(named: NamedTensors, group: Any) -> list[str]:
    """Names of what differs within a group; all ranks of the group call it."""
    if not named or group is None:
        return []
    mine = torch.stack([_hash(local(tensor)) for _, tensor in named])
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    return [name for (name, _), bad in zip(named, (low != high).tolist(), strict=True) if bad]


def _hash(part: torch.Tensor) -> torch.Tensor:
    """64 bits on the host; 0 of a part without rows, as a rank may have."""
    if not part.numel():
        return torch.zeros((), dtype=torch.int64)
    return torch.hash_tensor(_plain(part)).view(torch.int64).cpu().reshape(())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a type that can be hashed: bytes, where torch has no kernel for its own."""
    known = tensor.is_floating_point() or tensor.dtype in (torch.int64, torch.int32, torch.uint8, torch.bool)
    return tensor if known else tensor.contiguous().reshape(-1).view(torch.uint8)


def require_equal_weights(
    model: nn.Module, mesh: Mesh, when: str, copies: Mapping[str, int] | None = None, *, whole: bool = False
) -> None:
    """Stop if replicas differ.

    Args:
        model: bare module.
        mesh: the ranks.
        when: for the message, as `before the first step`.
        copies: by name, on how many neighbours along tp a parameter is the same.
        whole: nothing is cut yet.

    Raises:
        RankDisagreement: naming the parameters.
    """
    names = disagreeing(parameters_in_order(model), mesh, copies, whole=whole)
    if names:
        raise RankDisagreement(
            f"weights {when}",
            f"differ between ranks: {first_of(names)}.",
            "A function that builds the model must give the same weights on every rank: draw random numbers from "
            "torch's, numpy's or Python's global generators alone, which are seeded for it.",
        )


def reconcile_buffers(model: nn.Module, mesh: Mesh) -> list[str]:
    """Average the running statistics of batch norms over the ranks, and name the other buffers that differ; collective.

    Each rank's statistics come from its own samples; their mean is what evaluation and checkpoints use. Any other
    buffer that differs is a fault of the model (or a count of its own calls), and rank 0's is what checkpoints hold.
    A batch norm's own count of calls is no fault: a rank without rows in an epoch's last step makes one less. What is
    equal everywhere is left as it is: a mean of equal numbers may round to another one.
    """
    if mesh.is_alone:
        return []
    norms = set(batch_norms(model))
    averaged: list[tuple[str, torch.Tensor]] = []
    others: list[tuple[str, torch.Tensor]] = []
    for name, buffer in ((bare_name(name), buffer) for name, buffer in model.named_buffers()):
        if name.rpartition(".")[0] not in norms:
            others.append((name, buffer))
        elif buffer.is_floating_point():
            averaged.append((name, buffer))
    apart = set(disagreeing(averaged, mesh))
    for name, buffer in averaged:
        if name in apart:
            dist.all_reduce(buffer, group=mesh.groups.dp)
            buffer.div_(mesh.layout.dp_degree)
    return disagreeing(others, mesh)
