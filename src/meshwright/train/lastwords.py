"""What a rank leaves behind when it ends: a small JSON record, so that nothing has to be unpickled."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from meshwright.errors import Fault, MeshwrightError, SpecError

RETURNED: Final = "returned"
LEFT_WORLD: Final = "left"
ERROR: Final = "error"
EXIT: Final = "exit"
LOST_PEER: Final = "lost peer"
ENDED: Final = "ended"
# How gloo, NCCL and the stores say that some other rank is gone or late. Their exceptions have no better mark.
_PEER_MARKS: Final = (
    "gloo/transport",
    "gloo/rendezvous",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "timed out after",
    "Timed out after",
    "Socket Timeout",
    "wait timeout",
    "Application timeout",
    "recvValue failed",
    "sendBytes failed",
    "NCCL error",
    "NCCL communicator",
    "ncclRemoteError",
    "connect() timed out",
    "The client socket has",
)
OWN_FAULT: Final = MeshwrightError.exit_code
"""Exit code of a fault of meshwright's own."""

PACKAGE: Final = str(Path(__file__).parents[1]) + os.sep
DOOR: Final = os.path.join("parallel", "entry.py")
"""Where the user's functions are called: what is raised right there is a function that does not take the arguments."""

_PEER_TYPES: Final = ("DistBackendError", "DistNetworkError", "DistStoreError")


@dataclass(frozen=True, slots=True)
class LastWords:
    """Why one rank ended, in its own words.

    Attributes:
        rank: whose words.
        kind: `returned` (from main), `left` (the process group), `error` (its own), `exit` (SystemExit), `lost peer` (a
            collective failed: somebody else's fault) or `ended` (asked to, by a signal).
        family: names of the exception's classes, most special first.
        message: the exception's text; for a MeshwrightError that of `parts`.
        parts: what a MeshwrightError was made of: asked, rule, nearest.
        faults: what a SpecError carries besides: where, rule, nearest of each.
        exit_code: with which code the rank leaves.
        where: file, line and function where the exception was raised.
        details: the traceback.
        wall_s: when (`time.time`: ranks may be on different hosts).
    """

    rank: int
    kind: str
    family: tuple[str, ...] = ()
    message: str = ""
    parts: tuple[str, ...] = ()
    faults: tuple[tuple[str, str, str], ...] = ()
    exit_code: int = 0
    where: str = ""
    details: str = ""
    wall_s: float = field(default_factory=time.time)

    @property
    def error(self) -> str:
        """`ValueError: the text`, at most a few lines of it."""
        name = self.family[0] if self.family else "Exception"
        text = self.message.strip()
        short = text if len(text) <= 600 else text[:600] + " ..."
        return f"{name}: {short}" if short else name

    @property
    def timed_out(self) -> bool:
        """Whether the collective waited in vain, rather than found a connection closed."""
        text = self.message.lower()
        return "timed out" in text or "timeout" in text


def last_words(rank: int, error: BaseException | None) -> LastWords:
    """The words for a rank that returned (None) or ended by `error`."""
    if error is None:
        return LastWords(rank, RETURNED)
    if isinstance(error, SystemExit):
        return _words_of_exit(rank, error)
    family = tuple(cls.__name__ for cls in type(error).__mro__ if cls is not object)
    own = isinstance(error, MeshwrightError)
    parts = (error.asked, error.rule, error.nearest) if isinstance(error, MeshwrightError) else ()
    faults = error.faults if isinstance(error, SpecError) else ()
    return LastWords(
        rank,
        ERROR if own or not lost_peer(error) else LOST_PEER,
        family,
        str(error),
        parts,
        tuple((fault.where, fault.rule, fault.nearest) for fault in faults),
        error.exit_code if isinstance(error, MeshwrightError) else OWN_FAULT if _is_ours(error) else 4,
        _where(error),
        "".join(traceback.format_exception(error)),
    )


def lost_peer(error: BaseException) -> bool:
    """Whether the error, or what it was raised from, only says that another rank is gone or late."""
    return any(_says_lost_peer(link) for link in _chain(error))


def write_words(path: Path, words: LastWords) -> None:
    """Write the record whole or not at all: the supervisor may read at any moment."""
    beside = path.with_suffix(".part")
    beside.write_text(format_words(words), encoding="utf-8")
    os.replace(beside, path)


def format_words(words: LastWords) -> str:
    """The record as text."""
    return json.dumps(asdict(words))


def parse_words(text: str) -> LastWords:
    """The record that `format_words` made."""
    raw = json.loads(text)
    raw["family"], raw["parts"] = tuple(raw["family"]), tuple(raw["parts"])
    raw["faults"] = tuple(tuple(fault) for fault in raw["faults"])
    return LastWords(**raw)


def revive(words: LastWords, name_rank: bool) -> MeshwrightError | None:
    """The MeshwrightError that the rank raised, of the same class; None if it raised something else.

    Args:
        words: the rank's record.
        name_rank: whether to say which rank it was; needless where all said the same.
    """
    known = {cls.__name__: cls for cls in _tree(MeshwrightError)}
    found = next((known[name] for name in words.family if name in known), None)
    if found is None or not words.parts:
        return None
    asked, rule, nearest = words.parts
    faults = [Fault(*fault) for fault in words.faults]
    # A subclass may take other arguments than the root; its record still holds the root's three parts.
    error = found.__new__(found)
    MeshwrightError.__init__(error, f"rank {words.rank}: {asked}" if name_rank else asked, rule, nearest)
    if isinstance(error, SpecError):
        error.faults = tuple(faults)
    return error


def leave(exit_code: int) -> NoReturn:
    """End this process now: no `atexit`, no waiting for other ranks or threads. What was printed is not lost."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(exit_code)


def _is_ours(error: BaseException) -> bool:
    """Was it raised in this package, or in a library that this package called, rather than the user's code?"""
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(PACKAGE):
            return not frame.filename.endswith(DOOR)
        if not frame.filename.startswith((*libraries, "<")):
            return False
    return False


def _where(error: BaseException) -> str:
    """The innermost frame of the user's code; of any code if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    own = [frame for frame in frames if not frame.filename.startswith((*libraries, "<"))]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"


def _words_of_exit(rank: int, error: SystemExit) -> LastWords:
    if error.code is None or error.code == 0:
        return LastWords(rank, RETURNED)
    if isinstance(error.code, int):
        return LastWords(rank, EXIT, ("SystemExit",), f"sys.exit({error.code})", exit_code=error.code)
    return LastWords(rank, EXIT, ("SystemExit",), f"sys.exit: {error.code}", exit_code=1)


def _says_lost_peer(error: BaseException) -> bool:
    if type(error).__name__ in _PEER_TYPES:
        return True
    text = str(error)
    return isinstance(error, (RuntimeError, ConnectionError, TimeoutError)) and any(
        mark in text for mark in _PEER_MARKS
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _tree(root: type[MeshwrightError]) -> Iterator[type[MeshwrightError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)
