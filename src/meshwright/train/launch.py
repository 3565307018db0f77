"""Start the ranks of a run on this machine, or take part in a run that torchrun started.

This module imports torch only inside functions, so that a command line can show its help without it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, TypeVar

from meshwright.errors import Interrupted, MeshwrightError, SpecError
from meshwright.streams import wait_for_first_of_node, write_line
from meshwright.train.environ import DEBUG, DEFAULT_TIMEOUT_S, ROOM, TIMEOUT_S, Place, check_nproc, read_place
from meshwright.train.lastwords import last_words, leave, write_words
from meshwright.train.native import die_with, release_openmp_threads, settle_torch
from meshwright.train.pulse import Pulse, create_board, open_board, start_heart
from meshwright.train.supervise import STOPPED_S, Patience, Terminated, end_ranks, read_words, supervise

T = TypeVar("T")
Start = Literal["auto", "fork", "spawn"]
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Seat:
    """What one rank is told at its start."""

    rank: int
    nproc: int
    port: int
    room: Path
    timeout_s: float
    parent_pid: int

    def environment(self) -> dict[str, str]:
        """The variables that torchrun would set, and our two."""
        numbers = {"RANK": self.rank, "LOCAL_RANK": self.rank, "WORLD_SIZE": self.nproc, "LOCAL_WORLD_SIZE": self.nproc}
        return {name: str(number) for name, number in numbers.items()} | {
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            # The parent serves the store, as torchrun's agent does: no rank's death takes it away.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            ROOM: str(self.room),
            TIMEOUT_S: str(self.timeout_s),
        }


def launch(
    main: Callable[[], T],
    nproc: int | None = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    start: Start = "auto",
    log_dir: str | os.PathLike[str] | None = None,
) -> T | None:
    """Call `main` on every rank and return rank 0's value.

    The same file runs under torchrun: a process that already is a rank calls `main` itself.

    Args:
        main: what each rank does; it takes no arguments. Where ranks are spawned it must be importable by name.
        nproc: how many ranks; one for each GPU, or one, if None.
        timeout_s: how long ranks wait in a collective for one that does not come, before the run ends.
        start: `fork` (fast, the default where there is no GPU) or `spawn` (fresh interpreters).
        log_dir: where a failed rank's traceback is kept, as `error-rank1.txt`.

    Returns:
        What `main` returned on rank 0; None if that cannot be pickled.

    Raises:
        SpecError: `nproc` is not a number of ranks, or contradicts the world that this process is in.
        RankDied: a rank was killed, hung, or raised; says which and where. A MeshwrightError that a rank raised comes
            through as it is.
        Interrupted: Ctrl-C.
    """
    try:
        place = read_place()
        if place is not None:
            return _take_part(main, nproc, timeout_s, place)
        chosen = _choose_nproc(nproc)
        with _private_room() as room, _on_sigterm():
            try:
                return _run(main, Seat(0, chosen, 0, room, timeout_s, os.getpid()), start)
            finally:
                _keep_details(room, chosen, log_dir)
    except MeshwrightError as error:
        _speak_plainly(error)
        raise
    except KeyboardInterrupt:  # also Terminated
        # Before the ranks were under supervision, which has more to say.
        early = Interrupted("interrupted", "before step 1")
        _speak_plainly(early)
        raise early from None


def _take_part(main: Callable[[], T], nproc: int | None, timeout_s: float, place: Place) -> T:
    """This process already is a rank: of torchrun's, say, or of an outer `launch`."""
    check_nproc(nproc, place)
    os.environ.setdefault(TIMEOUT_S, str(timeout_s))
    if place.launcher == "meshwright" or place.world_size == 1:
        return main()
    from .inquest import end_rank

    try:
        return main()
    except SystemExit:
        raise
    except BaseException as error:
        end_rank(place, error)


def _run(main: Callable[[], T], seat: Seat, start: Start) -> T | None:
    method = _choose_start(start, main)
    create_board(seat.room / "pulse", seat.nproc)
    with socket.socket() as listener:
        # Listening before any rank starts: one that is early waits in the queue until the store is served.
        listener.bind(("127.0.0.1", 0))
        listener.listen(max(128, 4 * seat.nproc))
        port = listener.getsockname()[1]
        seats = [Seat(rank, seat.nproc, port, seat.room, seat.timeout_s, seat.parent_pid) for rank in range(seat.nproc)]
        ranks = _start_ranks(main, seats, method, listener.fileno())
        try:
            store = _serve_store(port, os.dup(listener.fileno()))
        except BaseException:
            end_ranks(ranks)
            raise
    try:
        supervise(ranks, seat.room, Patience(min(STOPPED_S, seat.timeout_s), seat.timeout_s))
    finally:
        # Now, not when the traceback that holds this frame goes: its thread would not be in a process forked later,
        # and there its destructor aborts.
        del store
    value: T | None = _read_value(seat.room)
    return value


def _choose_nproc(nproc: int | None) -> int:
    if nproc is None:
        import torch

        return max(torch.cuda.device_count(), 1)
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise SpecError(f"nproc = {nproc!r}", "a number of ranks is an integer from 1", "Try nproc=1.")
    return nproc


def _choose_start(start: Start, main: Callable[[], Any]) -> str:
    """Forking shares one import of torch; a process that may have touched CUDA must not be forked."""
    import torch

    method = start
    if start == "auto":
        method = "spawn" if torch.cuda.device_count() > 0 or not hasattr(os, "fork") else "fork"
    if method == "spawn":
        try:
            pickle.dumps(main)
        except Exception as error:
            raise SpecError(
                f"launch({getattr(main, '__qualname__', main)!s})",
                f"fresh interpreters find main by its name, and it has none that can be imported ({error})",
                "Define it at the top of a module; functools.partial binds its arguments.",
            ) from None
    return method


@contextmanager
def _private_room() -> Iterator[Path]:
    room = Path(tempfile.mkdtemp(prefix=f"meshwright-{os.getpid()}-"))
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


@contextmanager
def _on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind this process, so that the ranks are ended; without it they would be orphans for a moment."""

    def unwind(number: int, frame: object) -> NoReturn:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, unwind)
    except ValueError:
        # Not the main thread: the ranks then end by the death signal.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _start_ranks(main: Callable[[], Any], seats: Sequence[Seat], method: str, listener: int) -> list[BaseProcess]:
    context: Any = multiprocessing.get_context(method)
    quiet = _quiet_environment()
    if method == "fork":
        # Once, here, for all ranks.
        import meshwright.train.world  # noqa: F401

        sys.stdout.flush()
        sys.stderr.flush()
        release_openmp_threads()
    ranks: list[BaseProcess] = []
    # A Ctrl-C while they start would end them with a traceback each: they take signals when they are ready for them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        for seat in seats:
            passed = listener if method == "fork" else -1
            rank = context.Process(target=rank_entry, args=(main, seat, passed), name=f"meshwright-rank{seat.rank}")
            with _environment(quiet | seat.environment()), warnings.catch_warnings():
                # Python 3.12 and later warn of any fork with threads; ours are OpenBLAS's, which survives it.
                warnings.simplefilter("ignore", DeprecationWarning)
                rank.start()
            ranks.append(rank)
    except BaseException:
        end_ranks(ranks)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return ranks


def _quiet_environment() -> dict[str, str]:
    """Defaults for ranks that the user's own settings override."""
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {name: value for name, value in defaults.items() if name not in os.environ}


@contextmanager
def _environment(extra: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _serve_store(port: int, listener: int) -> object:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and missing from the stubs

    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener)


def rank_entry(main: Callable[[], Any], seat: Seat, listener: int) -> None:
    """The whole life of one rank. Returns only if `main` did; every other way out is a record and a hard exit."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    die_with(seat.parent_pid)
    if listener >= 0:
        os.close(listener)
    settle_torch()
    pulse = Pulse(open_board(seat.room / "pulse"), seat.rank)
    start_heart(lambda: _throb(pulse, seat.parent_pid))
    record = seat.room / f"rank{seat.rank}.json"
    try:
        value = main()
        if seat.rank == 0:
            _write_value(seat.room, value)
    except BaseException as error:
        words = last_words(seat.rank, error)
        write_words(record, words)
        leave(words.exit_code)
    write_words(record, last_words(seat.rank, None))


def _throb(pulse: Pulse, parent_pid: int) -> None:
    if os.getppid() != parent_pid:
        os.killpg(0, signal.SIGKILL)
    pulse.throb()


def _write_value(room: Path, value: object) -> None:
    try:
        data = pickle.dumps(value)
    except Exception:
        # A value that cannot travel is no failure of the run; launch returns None and says so in its documentation.
        return
    (room / "value.pkl").write_bytes(data)


def _read_value(room: Path) -> Any:
    path = room / "value.pkl"
    # Written by our own rank in a folder that only this user can open.
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _keep_details(room: Path, nproc: int, log_dir: str | os.PathLike[str] | None) -> None:
    if log_dir is None:
        return
    Path(log_dir).mkdir(parents=True, exist_ok=True)
    for rank in range(nproc):
        words = read_words(room, rank)
        if words is not None and words.details:
            Path(log_dir, f"error-rank{rank}.txt").write_text(words.details, encoding="utf-8")


def _speak_plainly(error: MeshwrightError) -> None:
    """If nobody catches the error, print its text without a traceback and exit with its code."""
    if sys.excepthook is not sys.__excepthook__ or os.environ.get(DEBUG):
        return

    def speak(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not error:
            sys.__excepthook__(kind, value, trace)
            return
        wait_for_first_of_node()
        write_line(sys.stderr, error.line)
        raise SystemExit(error.exit_code)

    sys.excepthook = speak
