"""How a rank without a supervisor of ours (under torchrun, say) makes itself known, and hears that it must end.

A thread posts a notice every second. It also hears the agent's signals: the main thread may be inside a collective, and
Python's own handlers would wait for it. Either thread ends the rank through one door (inquest.py).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn, final

from meshwright.train.environ import Place
from meshwright.train.inquest import CONNECT_S, PERIOD_S, Signalled, end_rank
from meshwright.train.lastwords import LEFT_WORLD, LastWords
from meshwright.train.notices import Notice, NoticeBoard, connect_board, own_start, this_host
from meshwright.train.pulse import Pulse, create_own_board, open_board, remove_own_board


@final
class Herald:
    """Posts this rank's notices until `leave_quietly`; `end` is the way out after a failure."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._board = create_own_board()
        self.pulse: Final = Pulse(open_board(self._board))
        self._door = threading.Lock()
        self._wake_in, self._wake_out = os.pipe()
        for fd in (self._wake_in, self._wake_out):
            os.set_blocking(fd, False)
        self._stopped = threading.Event()
        self._restore = hear_signals(self._wake_out)
        self._thread = threading.Thread(target=self._run, name="meshwright-herald", daemon=True)
        self._thread.start()

    def end(self, error: BaseException) -> NoReturn:
        """Leave last words, say the cause if no other rank has, and exit."""
        if not self._door.acquire(blocking=False):
            # The other thread is at it, and ends the process.
            threading.Event().wait()
        end_rank(self._place, error, self._board)

    def leave_quietly(self) -> None:
        """The work is done: say so on the board, and stop."""
        self._stopped.set()
        self._restore()
        # Any byte ends the thread's wait; this one is no signal.
        os.write(self._wake_out, b"\0")
        self._thread.join(CONNECT_S)
        with suppress(Exception):
            board = connect_board(self._place.world_size, CONNECT_S)
            board.post(self._place.rank, self._notice(sys.maxsize, this_host(), own_start()))
            board.post_words(LastWords(self._place.rank, LEFT_WORLD))
        remove_own_board(self._board)

    def _run(self) -> None:
        board: NoticeBoard | None = None
        count, host, started = 0, this_host(), own_start()
        while not self._stopped.is_set():
            # A store that is not there, yet or any more, is no error of the heart: the collectives will say so.
            with suppress(Exception):
                board = board or connect_board(self._place.world_size, PERIOD_S)
                count += 1
                board.post(self._place.rank, self._notice(count, host, started))
            self._listen()

    def _notice(self, count: int, host: str, started: str) -> Notice:
        moment = self.pulse.read()
        quiet_s = time.monotonic() - moment.beat_s if moment.beat_s else 0.0
        board = str(self._board)
        return Notice(count, host, os.getpid(), started, board, moment.step, moment.phase, moment.microbatch, quiet_s)

    def _listen(self) -> None:
        """Wait a period, less if a signal comes."""
        ready, _, _ = select.select([self._wake_in], [], [], PERIOD_S)
        signals = os.read(self._wake_in, 64) if ready else b""
        for number in (signal.SIGINT, signal.SIGTERM):
            if number in signals:
                self.end(Signalled(number))


def hear_signals(fd: int) -> Callable[[], None]:
    """Have SIGTERM and SIGINT written to `fd`, where a thread hears them whatever the main thread is doing.

    Children that are forked meanwhile get the default actions back. Call what is returned to undo it.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    hearing = threading.Event()
    hearing.set()
    before = {number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    wakeup = signal.set_wakeup_fd(fd, warn_on_full_buffer=False)

    def restore() -> None:
        hearing.clear()
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)

    def forget_in_child() -> None:
        if hearing.is_set():
            signal.set_wakeup_fd(-1)
            for number in before:
                signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget_in_child)
    return restore


def _ignore(number: int, frame: object) -> None:
    """The herald's thread acts; this handler only keeps the default action away."""
