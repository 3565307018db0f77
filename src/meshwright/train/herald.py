"""How a rank without a supervisor (under torchrun, say) makes itself known, and how it ends when a rank fails.

The heart is a thread that posts a notice every second. The end, whether by an error or by a signal from the agent, goes
through one door: leave last words, find the first cause on the notice board, let one rank of all say it, exit hard.
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
from pathlib import Path
from typing import Final, NoReturn, final

from meshwright.errors import Interrupted, MeshwrightError, RankDied

from .blame import Witness, find_cause
from .environ import DEBUG, Place
from .lastwords import ENDED, LOST_PEER, RETURNED, LastWords, last_words, leave
from .notices import (
    Notice,
    NoticeBoard,
    connect_board,
    exit_code_of,
    latest_moment,
    own_start,
    state_of,
    this_host,
)
from .pulse import Moment, Pulse, create_own_board, open_board, read_moment, remove_own_board

PERIOD_S: Final = 1.0
_LOOK_S: Final = 0.1
_CONNECT_S: Final = 3.0
# After an error of our own, and once some cause is known: how long others may add theirs.
_GRACE_S: Final = 0.5
# A rank on another host is known only by its notices, so it takes a few periods to call it silent.
_SILENT_S: Final = 3.5


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
        self._thread.join(_CONNECT_S)
        remove_own_board(self._board)
        with suppress(Exception):
            board = connect_board(self._place.world_size, _CONNECT_S)
            board.post_words(last_words(self._place.rank, None))

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
        """Wait a period, less if a signal comes: the main thread may be inside a collective and cannot act on it."""
        ready, _, _ = select.select([self._wake_in], [], [], PERIOD_S)
        signals = os.read(self._wake_in, 64) if ready else b""
        for number in (signal.SIGINT, signal.SIGTERM):
            if number in signals:
                self.end(_Signalled(number))


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


class _Signalled(BaseException):
    """The agent asked this rank to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def end_rank(place: Place, error: BaseException, own_board: Path | None = None) -> NoReturn:
    """The door: last words, the cause, one line on stderr by one rank, a hard exit."""
    words = _words(place.rank, error)
    moment = Moment()
    if own_board is not None:
        with open_board(own_board) as own:
            moment = read_moment(own, 0)
    cause: MeshwrightError | None
    try:
        board = connect_board(place.world_size, _CONNECT_S)
        cause = _inquire(board, place, words, moment)
        speaks = board.claim("cause")
    except Exception:
        # The store is gone, and with it the way to agree on a speaker.
        cause, speaks = _without_board(place, words, moment), True
    if cause is not None and speaks:
        say(cause)
    if own_board is not None:
        remove_own_board(own_board)
    leave(words.exit_code if cause is None or words.kind == ENDED else cause.exit_code)


def say(error: MeshwrightError) -> None:
    """The one line that the user sees; the traceback too if they asked for it."""
    text = f"error: {error}" if not isinstance(error, Interrupted) else str(error)
    notes = "\n".join(getattr(error, "__notes__", [])) if os.environ.get(DEBUG) else ""
    # One write, so that lines of other ranks do not mix in.
    sys.stderr.write(f"{notes}\n{text}\n" if notes else f"{text}\n")
    sys.stderr.flush()


def judge(witnesses: list[Witness], words: LastWords) -> MeshwrightError:
    """The cause, given all that is known; Interrupted if this rank was ended from outside and nobody failed."""
    if any(w.failed or w.stopped_s or w.silent_s for w in witnesses if w.words is None or w.words.kind != ENDED):
        return find_cause(witnesses)
    last = max(w.moment.finished_step for w in witnesses)
    asked = "interrupted" if words.exit_code == 128 + signal.SIGINT else f"ended by {words.message}"
    return Interrupted(asked, f"the last finished step is {last}" if last else "before the end of step 1")


def look(
    board: NoticeBoard,
    place: Place,
    seen: dict[int, tuple[int, float]],
    dead: dict[int, int | None],
    own: Moment,
) -> list[Witness]:
    """One look at the board, and at /proc for the ranks of this host.

    Args:
        board: what the ranks have posted.
        place: who is looking.
        seen: for each rank, its last notice's count and when that was first seen; kept up to date here.
        dead: exit codes of ranks that were found dead; kept, since the code can be read for a moment only.
        own: where this rank is itself.
    """
    notices, words, now, host = board.read(), board.read_words(), time.monotonic(), this_host()
    witnesses: list[Witness] = []
    for rank in range(place.world_size):
        notice = notices.get(rank)
        if notice is None:
            joined = rank == place.rank or rank in words
            moment = own if rank == place.rank else Moment()
            witnesses.append(Witness(rank, words=words.get(rank), joined=joined, ended=rank in words, moment=moment))
            continue
        count, since = seen.get(rank, (-1, now))
        seen[rank] = (count, since) if count == notice.count else (notice.count, now)
        silent_s = now - seen[rank][1]
        state = state_of(notice) if notice.host == host else ""
        if state == "gone" and rank not in dead:
            dead[rank] = exit_code_of(notice)
        witnesses.append(
            Witness(
                rank,
                ended=rank in dead,
                exit_code=dead.get(rank),
                words=words.get(rank),
                moment=own if rank == place.rank else latest_moment(notice) if state else notice.moment,
                stopped_s=max(silent_s, 0.1) if state == "T" else 0.0,
                silent_s=silent_s if not state and silent_s >= _SILENT_S and rank not in words else 0.0,
                quiet_s=notice.quiet_s,
            )
        )
    return witnesses


def _inquire(board: NoticeBoard, place: Place, words: LastWords, own: Moment) -> MeshwrightError:
    """Post the words and watch the board until a cause is known."""
    board.post_words(words)
    seen: dict[int, tuple[int, float]] = {}
    dead: dict[int, int | None] = {}
    start = time.monotonic()
    settled_at: float | None = None
    while True:
        witnesses = look(board, place, seen, dead, own)
        now = time.monotonic()
        if settled_at is None and _has_cause(witnesses):
            settled_at = now + _GRACE_S
        limit_s = _GRACE_S + PERIOD_S if words.kind == ENDED else _SILENT_S + PERIOD_S
        complete = all(w.words is not None for w in witnesses)
        if complete or (settled_at is not None and now >= settled_at) or now - start >= limit_s:
            _clean_up(board, witnesses)
            return judge(witnesses, words)
        time.sleep(_LOOK_S)


def _has_cause(witnesses: list[Witness]) -> bool:
    """Whether somebody failed in another way than by losing a neighbour."""
    for w in witnesses:
        kind = w.words.kind if w.words is not None else ""
        if (w.ended and not kind) or w.stopped_s or w.silent_s or kind not in ("", LOST_PEER, RETURNED, ENDED):
            return True
    return False


def _clean_up(board: NoticeBoard, witnesses: list[Witness]) -> None:
    """On this host, kill stopped ranks (they cannot take the agent's SIGTERM), and remove what dead ones cannot."""
    notices = board.read()
    for w in witnesses:
        if w.rank in notices and notices[w.rank].host == this_host() and (w.stopped_s or w.ended):
            remove_own_board(Path(notices[w.rank].board))
        if w.stopped_s and w.rank in notices and state_of(notices[w.rank]) == "T":
            with suppress(OSError):
                os.kill(notices[w.rank].pid, signal.SIGKILL)


def _without_board(place: Place, words: LastWords, moment: Moment) -> MeshwrightError | None:
    if words.kind == ENDED:
        return None
    if words.kind != LOST_PEER:
        return find_cause([Witness(place.rank, words=words, moment=moment, ended=True)])
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return RankDied(
        f"rank {place.rank} lost the others {moment}",
        f"the store at {where}, which could say who failed, is gone too ({words.error}).",
        "The host or the launcher that serves it (node 0) ended: look there first.",
    )


def _words(rank: int, error: BaseException) -> LastWords:
    if isinstance(error, _Signalled):
        return LastWords(rank, ENDED, ("Signalled",), str(error), exit_code=128 + error.number)
    if isinstance(error, KeyboardInterrupt):
        return LastWords(rank, ENDED, ("KeyboardInterrupt",), "SIGINT", exit_code=128 + signal.SIGINT)
    return last_words(rank, error)


def _ignore(number: int, frame: object) -> None:
    """The herald's thread acts; this handler only keeps the default action away."""
