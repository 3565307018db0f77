"""How a rank without a supervisor of ours ends after a failure: last words, the first cause, one line by one rank.

All survivors look at the same notice board and at /proc, and come to the same cause; the first to claim it says it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn, final

from meshwright.errors import Interrupted, MeshwrightError, RankDied
from meshwright.streams import write_line
from meshwright.train.blame import Witness, find_cause
from meshwright.train.environ import DEBUG, Place
from meshwright.train.lastwords import ENDED, LEFT_WORLD, LOST_PEER, LastWords, last_words, leave
from meshwright.train.notices import (
    Notice,
    NoticeBoard,
    connect_board,
    exit_code_of,
    latest_moment,
    state_of,
    this_host,
)
from meshwright.train.pulse import Moment, open_board, read_moment, remove_own_board

# How often a rank posts a notice.
PERIOD_S: Final = 1.0
CONNECT_S: Final = 3.0
_LOOK_S: Final = 0.1
# Once some cause is known: how long others may add theirs.
_GRACE_S: Final = 0.5
# Who claimed the cause says it at once; longer than this, and it was killed meanwhile.
_SAID_S: Final = 8.0
# A rank on another host is known only by its notices, so it takes a few periods to call it silent.
_SILENT_S: Final = 3.5


@final
class Signalled(BaseException):
    """The agent asked this rank to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def end_rank(place: Place, error: BaseException, own_board: Path | None = None) -> NoReturn:
    """The door: last words, the cause, one line on stderr by one rank, a hard exit."""
    words = _words(place.rank, error)
    moment = _moment(own_board)
    cause: MeshwrightError | None
    try:
        board = connect_board(place.world_size, CONNECT_S)
        cause = Inquest(board, place, words, moment).hold()
    except Exception:
        # The store is gone, and with it the way to agree on a speaker.
        cause = _cause_without_board(place, words, moment)
        if cause is not None:
            say(cause)
    else:
        _say_once(board, cause)
    if own_board is not None:
        remove_own_board(own_board)
    leave(words.exit_code if cause is None or words.kind == ENDED else cause.exit_code)


def say(error: MeshwrightError) -> None:
    """The one line that the user sees; the traceback too if they asked for it."""
    notes = getattr(error, "__notes__", []) if os.environ.get(DEBUG) else []
    write_line(sys.stderr, "\n".join([*notes, error.line]))


def _say_once(board: NoticeBoard, cause: MeshwrightError) -> None:
    """The first to claim the cause says it; the others stay until then, as the first that leaves ends them all."""
    with suppress(Exception):
        if not board.claim("cause"):
            board.wait_for("cause", _SAID_S)
            return
    say(cause)
    with suppress(Exception):
        board.confirm("cause")


@final
class Inquest:
    """One rank's search for the first cause."""

    def __init__(self, board: NoticeBoard, place: Place, words: LastWords, own: Moment) -> None:
        self._board = board
        self._place = place
        self._words = words
        self._own = own
        self._host = this_host()
        self._seen: dict[int, tuple[int, float]] = {}
        # Kept, because the kernel tells an exit code only until the agent has taken note of it.
        self._dead: dict[int, int | None] = {}

    def hold(self) -> MeshwrightError:
        """Leave the words, and watch the board until a cause is known."""
        self._board.post_words(self._words)
        limit_s = _GRACE_S + PERIOD_S if self._words.kind == ENDED else _SILENT_S + PERIOD_S
        deadline = time.monotonic() + limit_s
        while True:
            witnesses = self.look()
            if _has_cause(witnesses):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() >= deadline or all(w.words is not None for w in witnesses):
                self._clean_up(witnesses)
                return judge(witnesses, self._words)
            time.sleep(_LOOK_S)

    def look(self) -> list[Witness]:
        """One look at the board, and at /proc for the ranks of this host."""
        notices, words = self._board.read(), self._board.read_words()
        return [self._witness(rank, notices.get(rank), words.get(rank)) for rank in range(self._place.world_size)]

    def _witness(self, rank: int, notice: Notice | None, words: LastWords | None) -> Witness:
        mine = rank == self._place.rank
        if notice is None:
            moment = self._own if mine else Moment()
            return Witness(rank, joined=mine or words is not None, ended=words is not None, words=words, moment=moment)
        near = notice.host == self._host
        state = state_of(notice) if near else ""
        if state == "gone" and rank not in self._dead:
            self._dead[rank] = exit_code_of(notice)
        unchanged_s = self._unchanged_s(rank, notice)
        return Witness(
            rank,
            ended=rank in self._dead,
            exit_code=self._dead.get(rank),
            words=words,
            moment=self._own if mine else latest_moment(notice) if near else notice.moment,
            stopped_s=max(unchanged_s, _LOOK_S) if state == "T" else 0.0,
            silent_s=unchanged_s if not near and unchanged_s >= _SILENT_S and words is None else 0.0,
            quiet_s=notice.quiet_s,
        )

    def _unchanged_s(self, rank: int, notice: Notice) -> float:
        now = time.monotonic()
        count, since = self._seen.get(rank, (-1, now))
        self._seen[rank] = (count, since) if count == notice.count else (notice.count, now)
        return now - self._seen[rank][1]

    def _clean_up(self, witnesses: list[Witness]) -> None:
        """On this host, kill stopped ranks (they cannot take the agent's SIGTERM), and remove what dead ones left."""
        notices = self._board.read()
        for w in witnesses:
            notice = notices.get(w.rank)
            if notice is None or notice.host != self._host or not (w.stopped_s or w.ended):
                continue
            remove_own_board(Path(notice.board))
            if state_of(notice) == "T":
                with suppress(OSError):
                    os.kill(notice.pid, signal.SIGKILL)


def judge(witnesses: list[Witness], words: LastWords) -> MeshwrightError:
    """The cause, given all that is known; Interrupted if the ranks were ended from outside and none failed before."""
    if any(w.failed or w.stopped_s or w.silent_s for w in witnesses if w.words is None or w.words.kind != ENDED):
        return find_cause(witnesses)
    last = max(w.moment.finished_step for w in witnesses)
    asked = "interrupted" if words.exit_code == 128 + signal.SIGINT else f"ended by {words.message}"
    return Interrupted(asked, f"the last finished step is {last}" if last else "before the end of step 1")


def _has_cause(witnesses: list[Witness]) -> bool:
    """Whether somebody failed in another way than by losing a neighbour."""
    for w in witnesses:
        kind = w.words.kind if w.words is not None else ""
        if (w.ended and not kind) or w.stopped_s or w.silent_s or kind not in ("", LOST_PEER, LEFT_WORLD, ENDED):
            return True
    return False


def _cause_without_board(place: Place, words: LastWords, moment: Moment) -> MeshwrightError | None:
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
    if isinstance(error, Signalled):
        return LastWords(rank, ENDED, ("Signalled",), str(error), exit_code=128 + error.number)
    if isinstance(error, KeyboardInterrupt):
        return LastWords(rank, ENDED, ("KeyboardInterrupt",), "SIGINT", exit_code=128 + signal.SIGINT)
    return last_words(rank, error)


def _moment(own_board: Path | None) -> Moment:
    if own_board is None:
        return Moment()
    with open_board(own_board) as board:
        return read_moment(board, 0)
