"""Which step is measured, and what is known of it besides the meter's numbers. Never a reason for a run to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.errors import MeshwrightError
from meshwright.parallel.leaves import local
from meshwright.spec.moments import BUFFERS, FORWARD, GRADIENTS, OPTIMIZER_STATE, PARAMETERS, UPDATE
from meshwright.train.measure import Blocks, Meter, Reading, Standing, Watch
from meshwright.train.measure_cpu import AllocationMeter
from meshwright.train.measure_cuda import AllocatorMeter
from meshwright.train.state import State

T = TypeVar("T")


@final
class MemoryWatch(Watch):
    """Measures the step that is due. What goes wrong stays here, in `why`: a training never hears of it.

    Args:
        state: of the training on this rank.
        device: whose memory is measured.
    """

    def __init__(self, state: State, device: torch.device) -> None:
        self.due: int | None = None
        """Which step to measure, counted from 0; None for none."""
        self.why = ""
        """Why the step that was due has no readings."""
        self._state, self._device = state, device
        self._meter: Meter | None = None
        self._step = -1
        self._before: dict[str, Blocks] = {}
        self._gradients: list[tuple[Any, int, int]] = []

    def begin(self, step: int) -> None:
        """Start to measure, if this is the step; of one that is computed again, the pass that takes more counts."""
        if self._meter is not None and step != self._step:
            self.abandon()
        if step == self.due and self._step != step:
            self._step, self.why = step, ""
            self._try(self._open)

    def _open(self) -> None:
        self._gradients, self._before = [], standing(self._state, self._device)
        self._meter = AllocatorMeter(self._device) if self._device.type == "cuda" else AllocationMeter()
        self._meter.open()
        self._meter.enter(FORWARD)

    def enter(self, moment: str) -> None:
        """Tell the meter, if there is one."""
        meter = self._meter
        if meter is not None:
            self._try(lambda: self._enter(meter, moment))

    def _enter(self, meter: Meter, moment: str) -> None:
        meter.enter(moment)
        if moment == UPDATE:
            storages = [local(tensor).untyped_storage() for tensor in _gradients_of(self._state)]
            self._gradients = [(_weak(s), s.data_ptr(), s.nbytes()) for s in storages]

    def end(self) -> dict[str, Reading] | None:
        """By moment, of the step that has just been made; None if it was not measured, and `why` says why."""
        meter = self._meter
        if meter is None:
            return None
        readings = self._try(lambda: self._readings(meter))
        self.abandon()
        return readings

    def _readings(self, meter: Meter) -> dict[str, Reading]:
        meter.close()
        after = standing(self._state, self._device)
        known = {address for blocks in after.values() for address in blocks}
        alive = [(address, size) for storage, address, size in self._gradients if not storage.expired()]
        kept = {address: size for address, size in alive if address not in known}
        return meter.readings(Standing(before=self._before, after=after, kept=kept))

    def abandon(self) -> None:
        """Stop measuring: the step failed, or the run is over."""
        meter, self._meter, self._gradients = self._meter, None, []
        if meter is not None:
            self._try(meter.close)

    def _try(self, work: Callable[[], T]) -> T | None:
        """Whatever goes wrong here must not end a training, which does not need it."""
        try:
            return work()
        except Exception as error:
            self.why = str(error) if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {error}"
            self.abandon()
            return None


def standing(state: State, device: torch.device) -> dict[str, Blocks]:
    """What of a training is in a device's memory now, by category; a block that two share counts for the first."""
    trained = [tensor for leaf in state.leaves for tensor in (leaf.parameter, leaf.leaf)]
    told: dict[str, Iterable[torch.Tensor]] = {
        PARAMETERS: [*state.model.parameters(), *trained],
        GRADIENTS: _gradients_of(state),
        OPTIMIZER_STATE: _tensors(state.optimizer.state.values()),
        BUFFERS: [*state.model.buffers(), *state.spreading.received()],
    }
    taken: set[int] = set()
    found: dict[str, Blocks] = {}
    for name, tensors in told.items():
        storages = [local(tensor).untyped_storage() for tensor in tensors if tensor.device.type == device.type]
        blocks = {s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}
        found[name] = {address: size for address, size in blocks.items() if address not in taken}
        taken.update(blocks)
    return found


def _weak(storage: torch.UntypedStorage) -> Any:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _gradients_of(state: State) -> list[torch.Tensor]:
    held = [tensor.grad for leaf in state.leaves for tensor in (leaf.parameter, leaf.leaf)]
    return [gradient for gradient in held if gradient is not None]


def _tensors(states: Iterable[dict[str, object]]) -> list[torch.Tensor]:
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
