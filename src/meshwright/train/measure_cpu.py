"""Memory of a step on a CPU, whose allocator keeps no statistics: every allocation and free, from torch's profiler.

The profiler is asked for memory alone, and not for operators, so that a step takes little longer. It tells address and
size of each block that this thread allocates, resizes or frees. What was there before is counted by hand: parameters,
gradients, optimizer state and buffers. Other tensors from before the step (a data set held in memory) do not count.

[Note: frees that nobody sees] A collective of gloo runs on a thread of its own, and where that thread is the last to
let go of a copy, this one hears nothing of the free. Such a block is missing at the end of the step, though it was
never freed. It counts until this thread's next event: by then the collective that it was made for is over. (How long
the other thread really keeps it depends on when it is given a turn. Counted so, a step gave other figures each time.)
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, NamedTuple, final

import torch
from torch._C import _autograd, _profiler
from torch.autograd.profiler import record_function

from meshwright.errors import RunError
from meshwright.spec.moments import AFTER, BEFORE
from meshwright.train.measure import Blocks, Meter, Reading, Standing, sums
from meshwright.train.native import hushed_torch

_MARK: Final = "meshwright memory: "
_KINETO: Final = "KINETO_LOG_LEVEL"


class Event(NamedTuple):
    """Something that the profiler saw.

    Attributes:
        time_ns: when, on its clock.
        address: of a block; 0 where a moment begins.
        size_bytes: above 0 where the block is allocated, below where it is freed.
        moment: that begins; empty elsewhere.
    """

    time_ns: int
    address: int = 0
    size_bytes: int = 0
    moment: str = ""


@final
class AllocationMeter(Meter):
    """Follows the blocks that are allocated and freed."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._events: list[Event] = []

    def open(self) -> None:
        """Start the profiler.

        Raises:
            RunError: the user has one on, and torch has room for one.
        """
        if _autograd._profiler_enabled():
            raise RunError("measuring memory on a CPU", "takes torch's profiler, and one was on already.")
        with ExitStack() as stack:
            stack.enter_context(_hushed())
            _start()
            stack.callback(self._stop)
            stack.callback(atexit.unregister, self.close)
            atexit.register(self.close)  # a process that ends with the profiler on ends in a crash
            self._open = stack.pop_all()

    def enter(self, moment: str) -> None:
        """Leave a mark between the allocations."""
        with record_function(_MARK + moment):
            pass

    def close(self) -> None:
        """Stop the profiler, if it has not been stopped."""
        self._open.close()

    def _stop(self) -> None:
        self._events = _in_order(_autograd._disable_profiler())

    def readings(self, standing: Standing) -> dict[str, Reading]:
        """What was there before the step, and what came and went in it.

        Raises:
            RunError: the profiler was stopped or replaced by someone else.
        """
        if not self._events:
            raise RunError("measuring memory on a CPU", "takes torch's profiler, and another took its place.")
        made = {event.address for event in self._events if event.size_bytes > 0}
        kept = {address: size for address, size in standing.kept.items() if address not in made}
        before, after = _joined(standing.before) | kept, _joined(standing.after) | standing.kept
        peaks, at_end = follow(self._events, sum(before.values()), unseen(self._events, after))
        # Some optimizers make their state anew. The profiler never saw the old come, and is silent when it goes.
        at_end -= sum(size for address, size in before.items() if address not in after)
        at_start = sum(before.values())
        return {
            BEFORE: Reading(measured_bytes=at_start, categories=sums(standing.before, kept, at_start)),
            **{moment: Reading(measured_bytes=peak) for moment, peak in peaks.items()},
            AFTER: Reading(measured_bytes=at_end, categories=sums(standing.after, standing.kept, at_end)),
        }


def follow(events: Sequence[Event], before_bytes: int, lost: frozenset[int]) -> tuple[dict[str, int], int]:
    """Add up what is alive.

    Args:
        events: in the order of time, the first moment's mark before any block.
        before_bytes: alive before the first. Frees of these blocks are passed over.
        lost: indices of allocations whose block is gone by the next event.

    Returns:
        The most bytes alive in each moment, and the bytes alive at the end.
    """
    live: Blocks = {}
    total, peaks, moment, gone = before_bytes, dict[str, int](), "", 0
    for i, event in enumerate(events):
        total, gone = total - live.pop(gone, 0), 0
        moment = event.moment or moment
        if event.size_bytes > 0:
            live[event.address] = event.size_bytes
            total += event.size_bytes
            gone = event.address if i in lost else 0
        else:
            total -= live.pop(event.address, 0)
        peaks[moment] = max(peaks.get(moment, 0), total)
    return peaks, total - live.get(gone, 0)


def unseen(events: Sequence[Event], known: Blocks) -> frozenset[int]:
    """Indices of the allocations whose free is missing; see [Note: frees that nobody sees].

    Args:
        events: in the order of time.
        known: blocks that are certainly alive at the end.
    """
    left: dict[int, int] = {}
    lost: list[int] = []
    for i, event in enumerate(events):
        before = left.pop(event.address, None)
        if event.size_bytes > 0:
            lost += [] if before is None else [before]
            left[event.address] = i
    doubtful = {address: i for address, i in left.items() if address not in known}
    if doubtful:  # seldom but in ZeRO; to look through all objects of Python takes a twentieth of a second
        seen = _seen_by_python()
        lost += [i for address, i in doubtful.items() if address not in seen]
    return frozenset(lost)


def _seen_by_python() -> set[int]:
    """Addresses of all tensors that some object of Python holds."""
    kinds, found = _with_subclasses(torch.Tensor), set()
    for thing in gc.get_objects():
        if type(thing) in kinds:  # half of what isinstance costs, over some 100,000 objects
            with suppress(Exception):  # a subclass need not have memory
                found.add(thing.untyped_storage().data_ptr())
    return found


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _joined(told: Mapping[str, Blocks]) -> Blocks:
    return {address: size for blocks in told.values() for address, size in blocks.items()}


def _start() -> None:
    kind, activities = _profiler.ProfilerState.KINETO, {_profiler.ProfilerActivity.CPU}
    shapes, memory, stack, flops, modules = False, True, False, False, False
    more = _profiler._ExperimentalConfig()
    config = _profiler.ProfilerConfig(kind, shapes, memory, stack, flops, modules, more, "")
    enable: Any = _autograd._enable_profiler  # the stubs do not know of scopes; with operators in it costs more
    _autograd._prepare_profiler(config, activities)
    enable(config, activities, {_profiler.RecordScope.USER_SCOPE})


def _in_order(result: Any) -> list[Event]:
    """Allocations, frees and marks by time."""
    events, todo = [], list(result.experimental_event_tree())
    while todo:
        node = todo.pop()
        todo += node.children
        if node.tag == _profiler._EventType.Allocation:
            block = node.extra_fields
            events.append(Event(node.start_time_ns, block.ptr, block.alloc_size))
        elif node.name.startswith(_MARK):
            events.append(Event(node.start_time_ns, moment=node.name.removeprefix(_MARK)))
    return sorted(events, key=lambda event: event.time_ns)


@contextmanager
def _hushed() -> Iterator[None]:
    """Nothing on stderr of the profiler's starts and stops, nor of blocks that come and go."""
    with hushed_torch():
        is_ours = _KINETO not in os.environ
        os.environ.setdefault(_KINETO, "99")
        try:
            yield
        finally:
            if is_ours:
                os.environ.pop(_KINETO, None)
