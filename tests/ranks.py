"""Real ranks for tests: one warm process, with torch imported once, forks a world of gloo ranks for each call.

Hugging Face's library takes seconds to import: the first ranks that need a part of it do so by themselves, and the
warm process before the next ones.

    def every_rank_sums(world, base):           # at the top of a test module; world is a meshwright World
        tensor = torch.full((2,), float(base + world.rank))
        dist.all_reduce(tensor)
        return tensor.tolist()

    def test_sum(run_ranks):
        assert run_ranks(2, every_rank_sums, 1) == [[3.0, 3.0], [3.0, 3.0]]

A call costs about a tenth of a second. Arguments and values travel pickled; a function travels as its module and name.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, RankDied

WARM_MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "meshwright.train.launch",
    "meshwright.train.world",
)


LEARNED = "transformers"
"""What of this a rank had to import, the warm process imports too."""


class RanksFailed(Exception):
    """A rank raised, died or hung; the text names it and holds its traceback."""


class RankPool:
    """The warm process. `run` may be called any number of times; `close` ends it."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._link: Connection | None = None

    def run(
        self,
        n: int,
        fn: Callable[..., Any],
        *args: Any,
        limit_s: float = 60.0,
        timeout_s: float = 20.0,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(world, *args)` on `n` ranks; the values in the order of the ranks.

        Args:
            n: how many ranks.
            fn: a function at the top of an importable module.
            args: for every rank the same; they are pickled.
            limit_s: for the whole call; the ranks are killed at its end.
            timeout_s: how long a collective may wait for a rank.
            env: environment variables for the ranks.
        """
        where = (fn.__module__, fn.__qualname__)
        request = pickle.dumps((list(sys.path), where, n, pickle.dumps(args), limit_s, timeout_s, env or {}))
        try:
            error, values = pickle.loads(self._ask(request, limit_s + 60))
        except (EOFError, OSError) as problem:
            self.close()
            raise RanksFailed(f"{where[1]} on {n} ranks: the pool itself died or hung ({problem!r})") from None
        if error is not None:
            raise error
        return [pickle.loads(value) for value in values]

    def close(self) -> None:
        """End the pool; the next call starts a new one."""
        if self._link is not None:
            self._link.close()
        if self._server is not None:
            try:
                self._server.wait(5)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait(5)
        self._server, self._link = None, None

    def _ask(self, request: bytes, limit_s: float) -> bytes:
        link = self._connect()
        link.send_bytes(request)
        if not link.poll(limit_s):
            raise TimeoutError(f"no answer in {limit_s:g} s")
        return link.recv_bytes()

    def _connect(self) -> Connection:
        if self._link is None:
            ours, theirs = socket.socketpair()
            code = f"import sys; sys.path[:] = {sys.path!r}; from ranks import serve; serve(*map(int, sys.argv[1:]))"
            arguments = [str(theirs.fileno()), str(os.getpid())]
            self._server = subprocess.Popen([sys.executable, "-c", code, *arguments], pass_fds=[theirs.fileno()])
            theirs.close()
            self._link = Connection(ours.detach())
        return self._link


def serve(fd: int, parent_pid: int) -> None:
    """The warm process: answer calls until the other end is closed."""
    from meshwright.train.native import die_with

    die_with(parent_pid)
    # Ctrl-C is for pytest, which then closes the link.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _too_long)
    for name in WARM_MODULES:
        importlib.import_module(name)
    link = Connection(fd)
    while True:
        try:
            request = link.recv_bytes()
        except EOFError:
            return
        link.send_bytes(pickle.dumps(_answer(*pickle.loads(request))))
        gc.freeze()  # what the ranks' collections do not look at stays shared with them


def _answer(
    path: list[str],
    where: tuple[str, str],
    n: int,
    args: bytes,
    limit_s: float,
    timeout_s: float,
    env: dict[str, str],
) -> tuple[Exception | None, list[bytes]]:
    from meshwright.train.launch import launch

    sys.path[:] = path
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            importlib.import_module(where[0])
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            launch(partial(_on_rank, where, args, folder, env), nproc=n, timeout_s=timeout_s, start="fork")
        except TimeoutError:
            return RanksFailed(
                f"{where[1]} on {n} ranks did not end within {limit_s:g} s; {_unfinished(folder, n)}"
            ), []
        except Exception as error:
            return _portable(error, where, n), []
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for name in Path(folder, "imported").read_text().split():
            importlib.import_module(name)
        return None, [Path(folder, str(rank)).read_bytes() for rank in range(n)]


def _on_rank(where: tuple[str, str], args: bytes, folder: str, env: dict[str, str]) -> None:
    from meshwright.train.world import join_world

    os.environ.update(env)
    known = set(sys.modules)
    fn: Any = importlib.import_module(where[0])
    for name in where[1].split("."):
        fn = getattr(fn, name)
    with join_world(device="cpu") as world:
        value = fn(world, *pickle.loads(args))
        Path(folder, str(world.rank)).write_bytes(pickle.dumps(value))
        if world.rank == 0:
            imported = [name for name in sys.modules if name.partition(".")[0] == LEARNED and name not in known]
            Path(folder, "imported").write_text("\n".join(imported))


def _portable(error: Exception, where: tuple[str, str], n: int) -> Exception:
    """The error as it is if it is one of ours that a rank raised; else text, tracebacks included."""
    notes = "\n".join(getattr(error, "__notes__", []))
    if isinstance(error, MeshwrightError) and not isinstance(error, RankDied):
        return error
    return RanksFailed(f"{where[1]} on {n} ranks: {error}\n{notes}")


def _unfinished(folder: str, n: int) -> str:
    late = [str(rank) for rank in range(n) if not Path(folder, str(rank)).exists()]
    return f"unfinished ranks: {', '.join(late)}"


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError


def seconds(call: Callable[[], Any]) -> float:
    """How long the call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
