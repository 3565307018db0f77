"""What a rank adds up over the microbatches of one step, and the one read of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist

from meshwright.errors import SpecError
from meshwright.parallel.gradients import Facts, Gradients
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
        gradients: what is known of the gradients as they lie there.
        weights: what each pair's sum was multiplied by before backward; None where it was not.
    """

    totals: list[float]
    counts: list[float]
    samples: int
    flags: list[float]
    gradients: Facts
    weights: list[float | None]


@final
class StepSums:
    """What a rank adds up over the microbatches of one step. Tensors stay on the device until the step's one read.

    Args:
        num_microbatches: of the step, all ranks together.
        device: of the sums.
        counts: is this the rank of its microbatches? Of those that share them by tp or pp one is.
    """

    def __init__(self, num_microbatches: int, device: torch.device, *, counts: bool = True) -> None:
        self.num_microbatches, self.device, self._counts = num_microbatches, device, counts
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
        self.ids += microbatch.ids.tolist() if self._counts else []

    def vector(self) -> torch.Tensor:
        """(microbatches x (2 pairs + 1) + 1,) fp64, to be summed over ranks.

        A row for each microbatch of the whole step: totals, counts, and how many of them are not finite. One rank has
        the row, so the sum over ranks rounds nothing; the sum over rows is taken where it does not round twice.
        """
        totals, counts = self._table(self.totals), self._table(self.counts)
        not_finite = (~(totals + counts).isfinite()).sum(1, keepdim=True, dtype=torch.float64)
        mine = torch.cat([totals, counts, not_finite], dim=1)
        rows = mine.new_zeros(self.num_microbatches, mine.shape[1])
        if not self._counts:
            return torch.cat([rows.reshape(-1), rows.new_zeros(1)])
        rows.index_add_(0, torch.tensor(self.indices, device=self.device), mine)
        return torch.cat([rows.reshape(-1), rows.new_tensor([float(len(self.ids))])])

    def _table(self, rows: Sequence[Sequence[torch.Tensor | float]]) -> torch.Tensor:
        """(microbatches, pairs) fp64."""
        scalars = [torch.as_tensor(x, dtype=torch.float64, device=self.device).reshape(()) for row in rows for x in row]
        return torch.stack(scalars).reshape(len(rows), self.pairs)


def read(sums: StepSums, gradients: Gradients, weights: Weights, ranks: int) -> Seen:
    """All-reduce the sums and what must be known of the gradients, and read all at once; collective.

    Args:
        sums: of this rank.
        gradients: after the last backward pass.
        weights: what the pairs were weighted by.
        ranks: all of them.
    """
    own, theirs = sums.vector(), gradients.summed()
    vector = torch.cat([own, theirs])
    if ranks > 1:
        dist.all_reduce(vector)
    known = gradients.known()
    weighed = [weight.to(vector.device).reshape(1) for weight in weights if weight is not None]
    values = torch.cat([vector, known, *weighed]).tolist()
    table, rest = values[: len(own)], values[len(own) :]
    n, width = sums.pairs, 2 * sums.pairs + 1
    columns = [table[i:-1:width] for i in range(width)]
    return Seen(
        totals=[added(column) for column in columns[:n]],
        counts=[added(column) for column in columns[n : 2 * n]],
        samples=int(table[-1]),
        flags=columns[-1],
        gradients=gradients.facts(rest[: len(theirs)], rest[len(theirs) : len(theirs) + len(known)]),
        weights=rest[len(theirs) + len(known) :] or [None],
    )


def added(numbers: list[float]) -> float:
    """Their sum, rounded once, and so the same in any order."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # beyond fp64, or inf - inf; the step's verdict says so
        return sum(numbers)
