"""A notice board in the store of torchrun, for runs without a supervisor of ours.

Each rank posts where it is once a second, and its last words when it ends. When a collective fails, the survivors read
the board to find out who is missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, final

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, and missing from the stubs

from meshwright.train.lastwords import LastWords, format_words, parse_words
from meshwright.train.pulse import Moment, open_board, process_state, read_moment, read_stat

_START_FIELD: Final = 19
_EXIT_CODE_FIELD: Final = 49


@dataclass(frozen=True, slots=True)
class Notice:
    """What a rank posts every second.

    Attributes:
        count: grows with every notice; one that stands still means a process that does not run.
        host: which machine, and which process numbers on it, so that only fitting ranks ask /proc about `pid`.
        pid: the process.
        started: the kernel's start time of the process, because numbers are used again.
        board: a file on that host where the process writes the same at every beat.
        step, phase, microbatch: where the training loop is.
        quiet_s: for how long the loop has reported nothing.
    """

    count: int
    host: str
    pid: int
    started: str
    board: str
    step: int
    phase: str
    microbatch: int
    quiet_s: float

    @property
    def moment(self) -> Moment:
        """Where the loop was."""
        return Moment(self.step, self.phase, self.microbatch)


@final
class NoticeBoard:
    """Notices and last words of all ranks, under one prefix of a store."""

    __slots__ = ("_prefix", "_store", "_world_size")

    def __init__(self, store: Store, world_size: int, prefix: str) -> None:
        self._store = store
        self._world_size = world_size
        self._prefix = prefix

    def post(self, rank: int, notice: Notice) -> None:
        """Replace the rank's notice."""
        self._store.set(f"{self._prefix}/notice/{rank}", json.dumps(asdict(notice)))

    def post_words(self, words: LastWords) -> None:
        """Leave the rank's last words."""
        self._store.set(f"{self._prefix}/words/{words.rank}", format_words(words))

    def read(self) -> dict[int, Notice]:
        """The notice of every rank that has posted one."""
        return {rank: Notice(**json.loads(text)) for rank, text in self._read("notice").items()}

    def read_words(self) -> dict[int, LastWords]:
        """The last words of every rank that has left some."""
        return {rank: parse_words(text) for rank, text in self._read("words").items()}

    def claim(self, what: str) -> bool:
        """Whether this call is the first of all ranks' for `what`."""
        return bool(self._store.add(f"{self._prefix}/claim/{what}", 1) == 1)

    def confirm(self, what: str) -> None:
        """Say that what this rank claimed is done."""
        self._store.set(f"{self._prefix}/done/{what}", "")

    def wait_for(self, what: str, limit_s: float) -> None:
        """Return when whoever claimed it has confirmed it.

        Raises:
            Exception: nobody did in time, or the store is gone (torch's DistStoreError or DistNetworkError).
        """
        self._store.wait([f"{self._prefix}/done/{what}"], timedelta(seconds=limit_s))

    def _read(self, kind: str) -> dict[int, str]:
        # One key at a time: asking for several waits until all of them exist.
        keys = {rank: f"{self._prefix}/{kind}/{rank}" for rank in range(self._world_size)}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}


def connect_board(world_size: int, wait_s: float, environ: Mapping[str, str] | None = None) -> NoticeBoard:
    """Open the board in the store that the environment names, through a connection of its own.

    Raises:
        Exception: nobody serves the store there (torch's DistNetworkError or DistStoreError).
    """
    environ = os.environ if environ is None else environ
    store = TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=wait_s),
    )
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return NoticeBoard(store, world_size, f"meshwright/{environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}")


def this_host() -> str:
    """A name for this machine and this numbering of processes (a container has its own)."""
    parts: list[str] = []
    for read in (_boot_id, lambda: os.readlink("/proc/self/ns/pid"), lambda: os.uname().nodename):
        try:
            parts.append(read())
        except OSError:
            parts.append("")
    return " ".join(parts)


def own_start() -> str:
    """The kernel's start time of this process."""
    return _field(os.getpid(), _START_FIELD)


def state_of(notice: Notice) -> str:
    """The state of the process behind a notice of this host: the kernel's letter, or `gone`."""
    if _field(notice.pid, _START_FIELD) != notice.started:
        return "gone"
    state = process_state(notice.pid)
    return "gone" if state in ("", "Z", "X") else state


def exit_code_of(notice: Notice) -> int | None:
    """How a dead process of this host ended, -N for signal N; None once its parent has taken note of it."""
    if process_state(notice.pid) != "Z" or _field(notice.pid, _START_FIELD) != notice.started:
        return None
    status = int(_field(notice.pid, _EXIT_CODE_FIELD) or 0)
    return -(status & 0x7F) if status & 0x7F else status >> 8


def latest_moment(notice: Notice) -> Moment:
    """Where a process of this host was at its last beat: a notice may be a second old, its board is not."""
    try:
        with open_board(Path(notice.board)) as board:
            return read_moment(board, 0)
    except (OSError, ValueError):
        return notice.moment


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _field(pid: int, index: int) -> str:
    """One field of /proc/PID/stat, counted from the state."""
    fields = read_stat(pid)
    return fields[index] if len(fields) > index else ""
