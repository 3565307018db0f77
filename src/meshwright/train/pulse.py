"""Where each rank is: a few bytes of shared memory that a rank writes and its supervisor reads.

Two clocks per rank. `beat` is called by the training loop and says how far the work is. The heart is a thread that
writes the time twice a second, whatever the loop is waiting for: a rank that waits in a collective has a silent loop
and a beating heart, and a stopped process has neither.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

BEFORE: Final = "start"
DONE: Final = "done"
LEFT: Final = "left"
IN: Final = " ("
"""Between a phase and the part of the model that is called in it."""
HEART_PERIOD_S: Final = 0.5
# Written in one call, so that the two halves of a slot, the loop's and the heart's, have one writing thread each.
_PHASE_BYTES: Final = 40
_BEAT: Final = struct.Struct(f"<qqd{_PHASE_BYTES}s")
_HEART: Final = struct.Struct("<d")
_HEART_OFFSET: Final = 64
_SLOT_BYTES: Final = 128
_OWN_PREFIX: Final = "meshwright-pulse-"


@dataclass(frozen=True, slots=True)
class Moment:
    """What one rank last reported.

    Attributes:
        step: the optimizer step in progress, numbered as in `metrics.jsonl` (1 is the first); 0 before any.
        phase: what the rank was doing in it; `done` once the step is finished, `left` after leaving the process group.
        microbatch: which microbatch of the step; -1 where there is none.
        beat_s: when it said so (`time.monotonic`, which all processes of a host share).
        heart_s: the last time its heart thread ran; 0 before the first.
    """

    step: int = 0
    phase: str = BEFORE
    microbatch: int = -1
    beat_s: float = 0.0
    heart_s: float = 0.0

    @property
    def finished_step(self) -> int:
        """The last step that this rank finished; 0 if none."""
        return self.step if self.phase in (DONE, LEFT) else max(self.step - 1, 0)

    def __str__(self) -> str:
        if self.step < 1:
            return "before its first step"
        past = f"after step {self.finished_step}" if self.finished_step else "before the end of step 1"
        if self.phase in (DONE, LEFT):
            return past
        where = f"microbatch {self.microbatch} of step {self.step}" if self.microbatch >= 0 else f"step {self.step}"
        return f"{past} (in {self.phase} of {where})" if self.phase else f"{past} (in {where})"


def create_board(path: Path, nproc: int) -> None:
    """Make the shared file, one slot per rank, all zero."""
    path.write_bytes(bytes(nproc * _SLOT_BYTES))


def create_own_board() -> Path:
    """A board for one rank that has no supervisor; neighbours on its host look it up when the rank is dead."""
    handle, name = tempfile.mkstemp(prefix=_OWN_PREFIX)
    os.close(handle)
    create_board(Path(name), 1)
    return Path(name)


def remove_own_board(path: Path) -> None:
    """Remove such a board, and nothing else, whoever says that the path is one."""
    if path.name.startswith(_OWN_PREFIX) and path.parent == Path(tempfile.gettempdir()):
        path.unlink(missing_ok=True)


def open_board(path: Path) -> mmap.mmap:
    """Map the file that `create_board` made."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def read_moment(board: mmap.mmap | bytearray, rank: int) -> Moment:
    """What `rank` last wrote. A torn read is possible and harmless: the next one is whole."""
    step, microbatch, beat_s, phase = _BEAT.unpack_from(board, rank * _SLOT_BYTES)
    (heart_s,) = _HEART.unpack_from(board, rank * _SLOT_BYTES + _HEART_OFFSET)
    if step == 0 and not beat_s:
        return Moment(heart_s=heart_s)
    name = phase.rstrip(b"\0").decode("utf-8", "replace")
    return Moment(step, name, microbatch, beat_s, heart_s)


@final
class Pulse:
    """One rank's slot. Without a board it writes to memory of its own, so that the training loop need not ask."""

    __slots__ = ("_board", "_offset", "_rank")

    def __init__(self, board: mmap.mmap | None = None, rank: int = 0) -> None:
        self._board: mmap.mmap | bytearray = bytearray(_SLOT_BYTES) if board is None else board
        self._rank = 0 if board is None else rank
        self._offset = self._rank * _SLOT_BYTES

    def beat(self, step: int, phase: str = "", microbatch: int = -1) -> None:
        """Say where this rank is. About a microsecond: call it at every phase of every microbatch.

        Args:
            step: the optimizer step in progress, from 1.
            phase: a word such as `forward`, `backward`, `optimizer`, `checkpoint`; `done` once the step is finished.
            microbatch: which microbatch of the step.
        """
        _BEAT.pack_into(self._board, self._offset, step, microbatch, time.monotonic(), phase.encode()[:_PHASE_BYTES])

    def enter(self, name: str) -> None:
        """Say which part of the model this rank calls, in the step and microbatch that it is in."""
        step, microbatch, _, phase = _BEAT.unpack_from(self._board, self._offset)
        word = phase.rstrip(b"\0").decode("utf-8", "replace").partition(IN)[0]
        self.beat(step, f"{word}{IN}{name[len(word) + len(IN) + 1 - _PHASE_BYTES :]})", microbatch)

    def throb(self) -> None:
        """Say that this process runs at all (the heart thread's call)."""
        _HEART.pack_into(self._board, self._offset + _HEART_OFFSET, time.monotonic())

    def read(self) -> Moment:
        """What this rank last wrote."""
        return read_moment(self._board, self._rank)


def start_heart(throb: Callable[[], None], period_s: float = HEART_PERIOD_S) -> threading.Event:
    """Call `throb` in a daemon thread every `period_s`, first at once. Set the event that is returned to stop it."""
    stop = threading.Event()

    def run() -> None:
        throb()
        while not stop.wait(period_s):
            throb()

    threading.Thread(target=run, name="meshwright-heart", daemon=True).start()
    return stop


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal (SIGSTOP, SIGTSTP). A debugger's stop, state `t`, is not meant."""
    return process_state(pid) == "T"


def process_state(pid: int) -> str:
    """The kernel's letter for the process (R, S, D, T, Z, ...); empty if it is gone or the system has no /proc."""
    fields = read_stat(pid)
    return fields[0] if fields else ""


def read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in brackets before the state, may hold anything, brackets and spaces included.
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []
