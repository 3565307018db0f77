"""A model's buffers as they were, for forward passes that must leave no trace; and what exact mode makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn as nn

from meshwright.errors import SpecError


@final
class KeptBuffers:
    """Copies of all buffers, and which tensor stood under each name (a model may put another one there)."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def put_back(self) -> None:
        """Make every buffer what it was."""
        for module, name, buffer, before in self._kept:
            module._buffers[name] = buffer
            # Through `.data`, which autograd does not watch: a backward pass to come may need this buffer, and finds it
            # as it was.
            buffer.data.copy_(before)

    def changes(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Number and fp64 difference of each buffer that is not what it was."""
        for number, (module, name, _, before) in enumerate(self._kept):
            now = module._buffers[name]
            if now is not None and not torch.equal(now, before):
                if before.is_complex():
                    raise SpecError(f"buffer {name}", "is complex and changes; exact mode averages real ones.")
                yield number, now.detach().double() - before.double()

    def add(self, number: int, difference: torch.Tensor) -> None:
        """Change one buffer by an fp64 difference, rounded once."""
        _, _, buffer, before = self._kept[number]
        before.copy_(before.double() + difference)
        buffer.data.copy_(before)

    def before(self) -> list[torch.Tensor]:
        """What they were, in the order of their numbers."""
        return [before for _, _, _, before in self._kept]


@final
class MeanBuffers:
    """What the microbatches of a step make of a model's buffers, whichever rank has them: for exact mode.

    Elsewhere a rank's microbatches follow one another, and ranks are averaged before the statistics are used, so other
    ranks make other statistics. Here each microbatch starts from the buffers of the step, which change by the mean of
    the microbatches' changes, summed in the order of the grid. One that is no floating-point number (a count of calls)
    changes as in the first microbatch that changed it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = KeptBuffers(model)
        self._changes: dict[int, dict[int, torch.Tensor]] = {}  # number of a buffer -> microbatch -> difference

    def take(self, microbatch: int) -> None:
        """Note how the buffers changed in this microbatch, after its backward pass, and put them back."""
        for number, difference in self._kept.changes():
            self._changes.setdefault(number, {})[microbatch] = difference
        self._kept.put_back()

    def settle(self, num_microbatches: int, degree: int, group: Any = None) -> None:
        """Change the buffers by what all ranks noted; collective.

        Args:
            num_microbatches: of the step that had rows, all ranks together.
            degree: data-parallel ranks.
            group: theirs.
        """
        before = self._kept.before()
        if not before:
            return
        changed = torch.tensor([float(number in self._changes) for number in range(len(before))])
        changed = changed.to(before[0].device)
        if degree > 1:
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=group)
        for number in changed.nonzero().flatten().tolist():
            rows = self._rows(number, before[number], num_microbatches)
            if degree > 1:
                dist.all_reduce(rows, group=group)  # each has one owner, and zeros from the others
            self._kept.add(number, _together(rows, before[number].is_floating_point()))

    def _rows(self, number: int, like: torch.Tensor, num_microbatches: int) -> torch.Tensor:
        """(microbatches, *shape) fp64: the changes of one buffer on this rank."""
        rows = torch.zeros(num_microbatches, *like.shape, dtype=torch.float64, device=like.device)
        for microbatch, difference in self._changes.get(number, {}).items():
            rows[microbatch] = difference
        return rows


def _together(rows: torch.Tensor, takes_mean: bool) -> torch.Tensor:
    """The mean of the rows, summed from the first on; or the first that is not zero."""
    if not takes_mean:
        return next((row for row in rows if bool(row.any())), rows[0])
    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row
    return total / len(rows)
