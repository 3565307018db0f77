"""Memory of a step on a GPU: what torch's caching allocator says of itself."""

from __future__ import annotations

from typing import final

import torch

from meshwright.spec.moments import AFTER, BEFORE, FORWARD
from meshwright.train.measure import Meter, Reading, Standing, sums


@final
class AllocatorMeter(Meter):
    """Reads and resets the allocator's peaks where one moment ends and another begins; nothing waits for the GPU.

    Args:
        device: a CUDA device. Its peaks since the start of the process are lost.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._moment, self._is_open = device, FORWARD, False
        self._peaks: dict[str, tuple[int, int]] = {}

    def open(self) -> None:
        """Note what there is."""
        self._peaks[BEFORE] = self._now()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._is_open = True

    def _now(self) -> tuple[int, int]:
        """Bytes allocated and reserved."""
        return torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)

    def enter(self, moment: str) -> None:
        """The peaks so far are of the moment before."""
        self._fold()
        self._moment = moment

    def _fold(self) -> None:
        allocated, reserved = self._peaks.get(self._moment, (0, 0))
        seen = torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
        self._peaks[self._moment] = max(allocated, seen[0]), max(reserved, seen[1])
        torch.cuda.reset_peak_memory_stats(self._device)

    def close(self) -> None:
        """Note what is left."""
        if self._is_open:
            self._is_open = False
            self._fold()
            self._peaks[AFTER] = self._now()

    def readings(self, standing: Standing) -> dict[str, Reading]:
        """As noted; the allocator rounds each block up, which counts as `other`."""
        told = {BEFORE: standing.before, AFTER: standing.after}
        return {
            moment: Reading(
                measured_bytes=allocated,
                reserved_bytes=reserved,
                categories=sums(told[moment], standing.kept, allocated) if moment in told else {},
            )
            for moment, (allocated, reserved) in self._peaks.items()
        }
