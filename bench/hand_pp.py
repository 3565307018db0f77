"""A pipeline by hand, for hand_loop.py: torch.distributed.pipelining's Schedule1F1B over equal runs of blocks.

The schedule is told not to divide gradients: the loss of a microbatch is a sum, divided by the count of the whole step.
torch clips by the norm of what a rank has; here the squares of all stages are added up first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from meshwright.spec.layout import Layout


@final
class Part(nn.Module):
    """The blocks of one rank, with the embedding on the first and the head on the last."""

    def __init__(self, bare: Any, rank: int, ranks: int) -> None:
        super().__init__()
        each = len(bare.blocks) // ranks
        self.blocks = nn.ModuleList(bare.blocks[rank * each : (rank + 1) * each])
        self.begins, self.ends = rank == 0, rank == ranks - 1
        self.sides = nn.ModuleList(
            ([bare.embedding] if self.begins else []) + ([bare.norm, bare.head] if self.ends else [])
        )
        object.__setattr__(self, "bare", bare)  # no child: it has other ranks' blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bare: Any = self.bare
        x = bare.begin(x) if self.begins else x
        x = bare.through(x, self.blocks, x.shape[1])
        return bare.end(x) if self.ends else x


@final
class Pipeline:
    """A rank's part and its schedule."""

    def __init__(self, bare: torch.nn.Module, layout: Layout, microbatches: int) -> None:
        rank = dist.get_rank()
        self.part = Part(bare, rank, layout.pp)
        stage = PipelineStage(self.part, rank, layout.pp, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, microbatches, loss_fn=self._loss, scale_grads=False)
        self._count = torch.ones(())

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / self._count

    def step(self, picked: Sequence[torch.Tensor], count: torch.Tensor) -> torch.Tensor:
        """Forward and backward of all microbatches; the summed loss on the last rank, a zero on the others."""
        self._count = count
        whole, losses = torch.cat(list(picked)), list[torch.Tensor]()
        given = (whole[:, :-1],) if self.part.begins else ()
        target = {"target": whole[:, 1:], "losses": losses} if self.part.ends else {}
        self._schedule.step(*given, return_outputs=False, **target)
        return torch.stack(losses).detach().sum() * count if losses else torch.zeros(())


def clip(parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_, by the norm over all stages."""
    square = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) ** 2
    dist.all_reduce(square)
    norm = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
