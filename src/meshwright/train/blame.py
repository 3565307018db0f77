"""Which rank was first, and why: a pure function from what is known about each rank to one error.

When one rank goes, its neighbours fail as well: a moment later with `Connection closed by peer`, or after the time-out.
Only one of these reports helps the user.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from meshwright.errors import MeshwrightError, RankDied
from meshwright.train.lastwords import ERROR, EXIT, LEFT_WORLD, LOST_PEER, OWN_FAULT, RETURNED, LastWords, revive
from meshwright.train.pulse import IN, LEFT, Moment

_HINTS: Final[dict[int, tuple[str, str]]] = {
    signal.SIGKILL: (
        "the usual sender is the kernel, when the host has no memory left.",
        "See `dmesg`; fewer ranks or loader workers per host, or a smaller microbatch, need less.",
    ),
    signal.SIGSEGV: (
        "native code touched memory that is not its own.",
        "Usually an extension for other versions.",
    ),
    signal.SIGBUS: ("native code lost its memory.", "Usually /dev/shm or a mapped file ran out of room."),
    signal.SIGABRT: ("native code gave up.", "The last lines it printed say why."),  # or see `_strayed`
    signal.SIGTERM: ("somebody asked it to end: a person, or a scheduler with a limit.", ""),
}
_FIX_HANG: Final = (
    "Look for a collective that only some ranks call, a loader that waits, or a slow step; train.timeout_s, or "
    "launch(timeout_s=...), gives it more time."
)


@dataclass(frozen=True, slots=True)
class Witness:
    """All that is known about one rank.

    Attributes:
        rank: which.
        joined: whether it has come to the meeting point; True where that cannot be known.
        ended: whether its process is gone.
        exit_code: its exit code if it ended; -N for death by signal N; None if unknown (another host).
        words: what it left behind, if anything.
        moment: where it was.
        stopped_s: for how long it has been stopped by a signal (state T); 0 if it is not.
        silent_s: for how long its heart has been silent; 0 if it beats.
        quiet_s: for how long its loop has reported nothing.
    """

    rank: int
    joined: bool = True
    ended: bool = False
    exit_code: int | None = None
    words: LastWords | None = None
    moment: Moment = field(default_factory=Moment)
    stopped_s: float = 0.0
    silent_s: float = 0.0
    quiet_s: float = 0.0

    @property
    def finished(self) -> bool:
        """Ended as it should."""
        return self.ended and self.returned and self.exit_code in (0, None)

    @property
    def returned(self) -> bool:
        """Done, in its own opinion, whether or not its process is gone."""
        return self.words is not None and self.words.kind in (RETURNED, LEFT_WORLD)

    @property
    def failed(self) -> bool:
        """Ended, or about to, in another way than by returning."""
        return (self.ended and not self.finished) or (self.words is not None and not self.returned)


def find_cause(witnesses: Sequence[Witness]) -> MeshwrightError:
    """The error that the user should see. At least one witness has failed, is stopped or is silent."""
    own = [w.words for w in witnesses if w.words is not None and w.words.kind == ERROR]
    killed = [w for w in witnesses if w.ended and (w.exit_code or 0) < 0]
    # NCCL's watchdog aborts a rank whose neighbour is gone: that death is a consequence if there is any other cause.
    struck = [w for w in killed if w.exit_code != -signal.SIGABRT]
    left = [w for w in witnesses if (w.words is not None and w.words.kind == EXIT) or _vanished(w)]
    for found in (
        [_blame_signal(w, witnesses) for w in struck[:1]],
        [_blame_error(min(own, key=lambda words: words.wall_s), own, witnesses)] if own else [],
        [_blame_exit(w) for w in left[:1]],
        _blame_still(witnesses),
        [_blame_signal(w, witnesses) for w in killed[:1]],
        _blame_absent(witnesses),
    ):
        if found:
            return found[0]
    return _blame_nobody(witnesses)


def _vanished(witness: Witness) -> bool:
    """Ended without a signal and without a word: `os._exit`, or native code that called exit."""
    return witness.ended and witness.words is None and (witness.exit_code is None or witness.exit_code >= 0)


def _strayed(witnesses: Sequence[Witness]) -> str:
    """What to look for where ranks stood in different parts of the model, whose weights they gather together."""
    places = [(w.rank, w.moment.phase) for w in witnesses if IN in w.moment.phase]
    if len({phase for _, phase in places}) < 2:
        return ""
    stood = ", ".join(f"rank {rank} in {phase}" for rank, phase in places[:4])
    return f"Last seen: {stood}. With ZeRO every rank must call the same modules, in the same order and as often."


def _blame_signal(witness: Witness, witnesses: Sequence[Witness]) -> RankDied:
    number = -(witness.exit_code or 0)
    name = signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
    rule, nearest = _HINTS.get(number, ("", ""))
    if number == signal.SIGABRT:
        nearest = _strayed(witnesses) or nearest
    return RankDied(f"rank {witness.rank} was killed by {name} {witness.moment}", rule, nearest)


def _blame_error(words: LastWords, own: Sequence[LastWords], witnesses: Sequence[Witness]) -> MeshwrightError:
    alike = len(own) == len(witnesses) and len({(w.family, w.parts or w.message) for w in own}) == 1
    error = revive(words, name_rank=not alike)
    if error is None:
        moment = next(w.moment for w in witnesses if w.rank == words.rank)
        where = f", at {words.where}" if words.where else ""
        error = RankDied(f"rank {words.rank} raised {words.error}; {moment}{where}")
        if words.exit_code == OWN_FAULT:
            error = MeshwrightError(
                str(error), "a fault of meshwright's own.", "Please report it with what --debug prints."
            )
    if words.details:
        error.add_note(f"On rank {words.rank}:\n{words.details.rstrip()}")
    return error


def _blame_exit(witness: Witness) -> RankDied:
    words = witness.words
    if words is not None:
        asked = f"rank {witness.rank} ended by {words.message} {witness.moment}"
        return RankDied(asked, "the other ranks still needed it.")
    if witness.exit_code is None:
        return RankDied(
            f"rank {witness.rank} died {witness.moment}",
            "it left no word, so something killed it.",
            "The usual killer is the kernel, when the host has no memory left: see `dmesg`.",
        )
    return RankDied(
        f"rank {witness.rank} ended with exit code {witness.exit_code} {witness.moment}",
        "it raised no exception and did not return from main.",
        "Something in it called os._exit.",
    )


def _blame_still(witnesses: Sequence[Witness]) -> list[RankDied]:
    """Ranks whose process does not run at all."""
    found: list[RankDied] = []
    for w in witnesses:
        if w.stopped_s > 0:
            how = f"has been stopped for {w.stopped_s:.0f} s" if w.stopped_s >= 1 else "is stopped"
            rule = f"its process is in state T (SIGSTOP); last seen {w.moment}"
            found.append(RankDied(f"rank {w.rank} {how}", rule))
    for w in witnesses:
        if w.silent_s > 0 and w.stopped_s == 0:
            how = f"has given no sign of life for {w.silent_s:.0f} s"
            rule = f"its process, or its host, hangs or died; last seen {w.moment}"
            found.append(RankDied(f"rank {w.rank} {how}", rule))
    return found


def _blame_absent(witnesses: Sequence[Witness]) -> list[RankDied]:
    """All that failed waited in vain, so the one that they waited for is among those that did not fail."""
    waiting = [w for w in witnesses if w.words is not None and w.words.kind == LOST_PEER]
    whom = _names([w.rank for w in waiting])
    gone = [w for w in witnesses if w.returned or w.moment.phase == LEFT]
    if gone and waiting:
        early = min(gone, key=lambda w: w.moment.step)
        from_main = early.words is not None and early.words.kind == RETURNED
        verb = "returned from main" if from_main else "left the process group"
        return [
            RankDied(
                f"rank {early.rank} {verb} {early.moment} while {whom} still needed it ({waiting[0].moment})",
                "every rank must take part in every collective.",
                "Run the same number of steps on all ranks.",
            )
        ]
    others = [w for w in witnesses if w.words is None and not w.ended]
    if not others:
        return []
    strangers = [w.rank for w in others if not w.joined]
    if strangers:
        asked = f"{_names(strangers)} never came to the meeting point where {whom} waited"
        return [RankDied(asked, "it ended or hangs before join_world.", "Look at the first lines that it printed.")]
    late = min(others, key=lambda w: (w.moment.step, w.moment.beat_s))
    quiet = f", silent for {late.quiet_s:.0f} s" if late.quiet_s >= 1 else ""
    return [
        RankDied(
            f"rank {late.rank} hangs: it is alive{quiet}, and did not come to the collective where {whom} waited; "
            f"last seen {late.moment}",
            _waited(waiting),
            _strayed(witnesses) or _FIX_HANG,
        )
    ]


def _blame_nobody(witnesses: Sequence[Witness]) -> RankDied:
    """Every rank says that another one was lost."""
    words = sorted((w.words for w in witnesses if w.words is not None), key=lambda words: words.wall_s)
    late = min(witnesses, key=lambda w: (w.moment.step, w.moment.beat_s))
    first = f"rank {words[0].rank} first, by {words[0].error}" if words else "no rank left a word."
    error = RankDied(
        f"the ranks lost each other; rank {late.rank} was the furthest behind, {late.moment}",
        first,
        _strayed(witnesses) or "Either ranks called different collectives, or the network between them failed.",
    )
    for each in words[:1]:
        error.add_note(f"On rank {each.rank}:\n{each.details.rstrip()}")
    return error


def _waited(waiting: Sequence[Witness]) -> str:
    whom = _names([w.rank for w in waiting])
    if any(w.words is not None and w.words.timed_out for w in waiting):
        return f"{whom} waited until the time-out."
    return f"{whom} lost the connection to it."


def _names(ranks: Sequence[int]) -> str:
    if not ranks:
        return "the others"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown}"
