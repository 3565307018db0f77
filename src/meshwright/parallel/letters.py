"""A tensor from one rank to another, who need not know its shape."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from meshwright.parallel.mesh import Group


def send_tensor(x: torch.Tensor, to: int, group: Group) -> None:
    """Send a tensor with its shape and type; `to`: a rank of the world."""
    dist.send_object_list([(x.shape, x.dtype)], dst=to, group=group, device=x.device)
    dist.send(x.contiguous(), dst=to, group=group)


def receive_tensor(source: int, group: Group, device: torch.device) -> torch.Tensor:
    """What `source`, a rank of the world, sends with `send_tensor`."""
    facts: list[Any] = [None]
    dist.recv_object_list(facts, src=source, group=group, device=device)
    shape, dtype = facts[0]
    x = torch.empty(shape, dtype=dtype, device=device)
    dist.recv(x, src=source, group=group)
    return x
