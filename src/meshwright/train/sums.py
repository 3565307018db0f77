"""What a rank adds up over the microbatches of one step, and the one read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist

from meshwright.errors import SpecError
from meshwright.train.counts import Weights
from meshwright.train.loader import Microbatch
from meshwright.train.loss import Pair


@dataclass(frozen=True, slots=True)
class Seen:
    """What a step reads from the device, once; the same on every rank.

    Attributes:
        totals: sum of each pair over all microbatches of all ranks.
        counts: count of each pair.
        samples: samples of the step.
        flags: for each microbatch of the step, how many of its losses are not finite.
        norm: 2-norm of the gradients as they lie there.
        weights: what each pair's sum was multiplied by before backward; None where it was not.
    """

    totals: list[float]
    counts: list[float]
    samples: int
    flags: list[float]
    norm: float
    weights: list[float | None]


@final
class StepSums:
    """What a rank adds up over the microbatches of one step. Tensors stay on the device until the step's one read."""

    def __init__(self, num_microbatches: int, device: torch.device) -> None:
        self.num_microbatches, self.device = num_microbatches, device
        self.totals: list[list[torch.Tensor]] = []  # a row for each microbatch, a scalar for each pair
        self.counts: list[list[torch.Tensor | float]] = []
        self.indices: list[int] = []
        self.ids: list[int] = []

    @property
    def pairs(self) -> int:
        """Pairs that the loss function returns."""
        return len(self.totals[0])

    def add(self, microbatch: Microbatch, pairs: list[Pair]) -> None:
        """Add one microbatch; a stand-in (without ids) has been weighted by 0 already."""
        if self.totals and len(pairs) != self.pairs:
            raise SpecError("the loss function", f"returned {self.pairs} pairs, then {len(pairs)}, in one step.")
        self.totals.append([pair.total.detach() for pair in pairs])
        # A copy, because a loss function may write each microbatch's count into one tensor.
        self.counts.append([p.count.clone() if isinstance(p.count, torch.Tensor) else p.count for p in pairs])
        self.indices.append(microbatch.index)
        self.ids += microbatch.ids.tolist()

    def vector(self) -> torch.Tensor:
        """(2 pairs + 1 + microbatches + 1,) fp64: totals, counts, samples, flags; each may be summed over ranks."""
        totals, counts = self._table(self.totals), self._table(self.counts)
        not_finite = (~(totals + counts).isfinite()).sum(1, dtype=torch.float64)
        flags = totals.new_zeros(self.num_microbatches + 1)
        flags.index_add_(0, torch.tensor(self.indices, device=self.device), not_finite)
        samples = totals.new_tensor([float(len(self.ids))])
        return torch.cat([totals.sum(0), counts.sum(0), samples, flags])

    def _table(self, rows: Sequence[Sequence[torch.Tensor | float]]) -> torch.Tensor:
        """(microbatches, pairs) fp64."""
        scalars = [torch.as_tensor(x, dtype=torch.float64, device=self.device).reshape(()) for row in rows for x in row]
        return torch.stack(scalars).reshape(len(rows), self.pairs)


def read(sums: StepSums, gradients: list[torch.Tensor], weights: Weights, dp_degree: int) -> Seen:
    """All-reduce the sums, take the norm of the (already reduced) gradients, and read all at once; collective.

    Args:
        sums: of this rank.
        gradients: its parts of them.
        weights: what the pairs were weighted by.
        dp_degree: data-parallel ranks.
    """
    vector, n = sums.vector(), sums.pairs
    if dp_degree > 1:
        dist.all_reduce(vector)
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else vector.new_zeros(())
    known = [weight for weight in weights if weight is not None]
    beside = [x.to(vector.device, torch.float64).reshape(1) for x in (norm, *known)]
    values = torch.cat([vector, *beside]).tolist()
    end = 2 * n + 2 + sums.num_microbatches
    return Seen(
        totals=values[:n],
        counts=values[n : 2 * n],
        samples=int(values[2 * n]),
        flags=values[2 * n + 1 : end],
        norm=values[end],
        weights=values[end + 1 :] or [None],
    )
