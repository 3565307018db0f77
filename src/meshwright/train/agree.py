"""Work that rank 0 does for all: its result, or its error, reaches every rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypeVar, cast, final

import torch.distributed as dist

from meshwright.errors import MeshwrightError

T = TypeVar("T")
PATIENCE: Final = timedelta(minutes=30)
"""How long ranks wait for rank 0's files; a disk may be slow. A stopped or dead rank 0 is found by its pulse."""


@final
class Agreement:
    """Runs work on rank 0 while the others wait for its outcome. None waits for a rank that has failed."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if world_size > 1 else None

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0; return its (picklable) result, or raise its MeshwrightError, on every rank."""
        outcome: list[object] = [None]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except MeshwrightError as error:
                outcome[0] = error
        if self._group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if isinstance(outcome[0], MeshwrightError):
            raise outcome[0]
        return cast(T, outcome[0])

    def meet(self) -> None:
        """Wait here for every rank, apart from the training's own collectives.

        A rank that comes alone waits here, and the others, who went on, wait for it where they are: the time-out then
        names it. Without this its collectives would meet the others' next ones, and both would compute nonsense.
        """
        if self._group is not None:
            dist.barrier(group=self._group)

    def gather(self, mine: T) -> list[T]:
        """The values of all ranks, in their order."""
        if self._group is None:
            return [mine]
        everyone: list[T | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self._group)
        return cast(list[T], everyone)
