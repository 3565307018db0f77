"""The parent's side of a run: watch the ranks, and when one fails end them all and say which and why."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, final

from meshwright.errors import Interrupted, MeshwrightError
from meshwright.train.blame import Witness, find_cause
from meshwright.train.lastwords import LastWords, parse_words
from meshwright.train.pulse import is_stopped, open_board, read_moment

POLL_S: Final = 0.05
# How long after the first failure others may still add theirs: a neighbour's noise often arrives before the cause.
GRACE_S: Final = 1.0
GRACE_AFTER_DEATH_S: Final = 0.2
STOPPED_S: Final = 10.0
TERM_S: Final = 1.0
KILL_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the supervisor waits before it calls a rank lost.

    Attributes:
        stopped_s: stopped by a signal (state T): somebody may continue it soon.
        silent_s: no heartbeat: one long call that holds the interpreter looks the same, so this is the whole time-out.
    """

    stopped_s: float
    silent_s: float


@final
class Terminated(KeyboardInterrupt):
    """SIGTERM to this process; it takes the same way out as Ctrl-C."""


@final
class Stethoscope:
    """Counts for how long each rank has been still, in time that this process itself saw pass.

    The clock alone would not do: when the whole machine, or this process, was paused, every heart looks late.
    """

    __slots__ = ("_board", "_hearts", "_last_s", "_pids", "_silent", "_stopped")

    def __init__(self, board: mmap.mmap, pids: Sequence[int]) -> None:
        self._board = board
        self._pids = list(pids)
        self._hearts = [-1.0] * len(pids)
        self._silent = [0.0] * len(pids)
        self._stopped = [0.0] * len(pids)
        self._last_s = time.monotonic()

    def listen(self) -> None:
        """Look at every rank once."""
        now = time.monotonic()
        passed = min(now - self._last_s, 10 * POLL_S)
        self._last_s = now
        for rank, pid in enumerate(self._pids):
            heart = read_moment(self._board, rank).heart_s
            self._silent[rank] = self._silent[rank] + passed if heart == self._hearts[rank] else 0.0
            self._hearts[rank] = heart
            # Asking the kernel costs more than reading memory, and a process that is stopped has no heartbeat either.
            quiet = self._silent[rank] > 1.0
            self._stopped[rank] = self._stopped[rank] + passed if quiet and is_stopped(pid) else 0.0

    def silent_s(self, rank: int) -> float:
        """For how long the rank's heart has been silent."""
        return self._silent[rank]

    def stopped_s(self, rank: int) -> float:
        """For how long the rank has been stopped by a signal."""
        return self._stopped[rank]


def supervise(ranks: Sequence[BaseProcess], room: Path, patience: Patience) -> None:
    """Return when all ranks have returned from main.

    Raises:
        MeshwrightError: the first cause of a failure; all ranks have been ended by then.
        Interrupted: Ctrl-C; the same.
    """
    with open_board(room / "pulse") as board:
        try:
            cause = _watch(ranks, room, board, patience)
        except KeyboardInterrupt as stop:
            last = max((read_moment(board, rank).finished_step for rank in range(len(ranks))), default=0)
            cause = _interrupted(stop, last)
        finally:
            with _deaf():
                end_ranks(ranks)
    if cause is not None:
        raise cause


def _interrupted(stop: KeyboardInterrupt, last_step: int) -> Interrupted:
    where = f"the last finished step is {last_step}" if last_step else "before the end of step 1"
    if isinstance(stop, Terminated):
        error = Interrupted("ended by SIGTERM", where)
        error.exit_code = 128 + signal.SIGTERM
        return error
    return Interrupted("interrupted", where)


@contextmanager
def _deaf() -> Iterator[None]:
    """Not to be interrupted again by a second, impatient Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_ranks(ranks: Sequence[BaseProcess]) -> None:
    """End every rank that still runs, and what it started: politely, then by force."""
    running = [rank for rank in ranks if rank.exitcode is None]
    for rank in running:
        # A stopped process would take the request only when it is continued.
        _signal_group(rank, signal.SIGTERM)
        _signal_group(rank, signal.SIGCONT)
    _wait_until_ended(running, TERM_S)
    for rank in ranks:
        # Also for ranks that have ended: children that they left behind are in their group.
        _signal_group(rank, signal.SIGKILL)
    _wait_until_ended(running, KILL_S)


def read_words(room: Path, rank: int) -> LastWords | None:
    """What the rank has left behind, if anything."""
    try:
        return parse_words((room / f"rank{rank}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _watch(ranks: Sequence[BaseProcess], room: Path, board: mmap.mmap, patience: Patience) -> MeshwrightError | None:
    ear = Stethoscope(board, [rank.pid or 0 for rank in ranks])
    decide_at: float | None = None
    while True:
        ear.listen()
        witnesses = _look(ranks, room, board, ear, patience)
        if all(w.finished for w in witnesses):
            return None
        if decide_at is None and any(w.failed or w.stopped_s or w.silent_s for w in witnesses):
            decide_at = time.monotonic() + GRACE_S
        if decide_at is not None:
            if any((w.exit_code or 0) < 0 or w.stopped_s for w in witnesses):
                decide_at = min(decide_at, time.monotonic() + GRACE_AFTER_DEATH_S)
            if time.monotonic() >= decide_at or all(w.ended for w in witnesses):
                return find_cause(witnesses)
        _pause(ranks)


def _look(
    ranks: Sequence[BaseProcess], room: Path, board: mmap.mmap, ear: Stethoscope, patience: Patience
) -> list[Witness]:
    return [_witness(rank, process, room, board, ear, patience) for rank, process in enumerate(ranks)]


def _witness(
    rank: int, process: BaseProcess, room: Path, board: mmap.mmap, ear: Stethoscope, patience: Patience
) -> Witness:
    # The code first: a record is written before its rank ends, never after.
    code = process.exitcode
    words = read_words(room, rank)
    moment = read_moment(board, rank)
    if code is not None:
        return Witness(rank, ended=True, exit_code=code, words=words, moment=moment)
    stopped_s, silent_s = ear.stopped_s(rank), ear.silent_s(rank)
    return Witness(
        rank,
        words=words,
        moment=moment,
        stopped_s=stopped_s if stopped_s >= patience.stopped_s else 0.0,
        silent_s=silent_s if silent_s >= patience.silent_s else 0.0,
        quiet_s=time.monotonic() - moment.beat_s if moment.beat_s else 0.0,
    )


def _pause(ranks: Sequence[BaseProcess]) -> None:
    """Sleep until the next look, less if a rank ends. Its children can hide its end: hence also the limit."""
    running = [rank.sentinel for rank in ranks if rank.exitcode is None]
    if running:
        wait(running, POLL_S)
    else:
        time.sleep(POLL_S)


def _signal_group(process: BaseProcess, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, number)


def _wait_until_ended(ranks: Sequence[BaseProcess], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while any(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S / 5)
