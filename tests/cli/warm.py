"""The real command without its start: a warm process, with torch imported once, forks a child for each call.

    result = bench.call("train", "r.toml", "--nproc", "2", cwd=folder)
    result.code, result.out, result.err

The child has a session, an environment, a temporary folder and streams of its own, and ends as a program does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

WARM = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "meshwright.train.launch",
    "meshwright.train.run",
    "tensorboard.summary",
)
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
OF_OTHERS = ("SLURM_NTASKS", "MESHWRIGHT_DEBUG", "MESHWRIGHT_ROOM", "MESHWRIGHT_TIMEOUT_S", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True)
class Result:
    """How a command ended. A negative code is a signal; None means that it did not end in time and was killed."""

    code: int | None
    out: str
    err: str
    seconds: float
    left: list[str]


class Bench:
    """`call` may be called any number of times; `close` ends the warm process."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def call(
        self,
        *words: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        before: str = "",
        limit_s: float = 60.0,
        terminal: str | None = None,
    ) -> Result:
        """Run `meshwright WORDS`.

        Args:
            words: the command's words.
            cwd: where it runs.
            env: variables that differ from this process's.
            before: Python code that the process runs first.
            limit_s: then it is killed, and all that it started.
            terminal: path of a terminal for stdout and stderr, in place of files.
        """
        with tempfile.TemporaryDirectory(prefix="warm-") as room:
            Path(room, "tmp").mkdir()
            request = {
                "words": words, "cwd": str(cwd), "env": dict(env or {}), "before": before, "limit_s": limit_s,
                "room": room, "terminal": terminal,
            }  # fmt: skip
            begin = time.perf_counter()
            code = self._ask(request, limit_s)
            texts = [
                Path(room, name).read_text(errors="replace") if terminal is None else "" for name in ("out", "err")
            ]
            names = sorted(path.name for path in Path(room, "tmp").iterdir())
            left = [name for name in names if not name.startswith("torchinductor_")]  # torch's own cache
            return Result(code, texts[0], texts[1], time.perf_counter() - begin, left)

    def _ask(self, request: Mapping[str, Any], limit_s: float) -> int | None:
        if self._server is None:
            code = f"import sys; sys.path[:] = {sys.path!r}; from cli.warm import serve; serve({os.getpid()})"
            self._server = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        assert answer, "the warm process died"
        found: int | None = json.loads(answer)
        return found

    def close(self) -> None:
        """End the warm process."""
        if self._server is not None:
            assert self._server.stdin is not None and self._server.stdout is not None
            self._server.stdin.close()
            self._server.wait(10)
            self._server.stdout.close()
        self._server = None


def serve(parent_pid: int) -> None:
    """The warm process: answer requests until stdin is closed."""
    from meshwright.train.native import die_with

    die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in WARM:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _be_the_command(request)
        print(json.dumps(_wait(pid, request["limit_s"])), file=answers, flush=True)


def _wait(pid: int, limit_s: float) -> int | None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            kill_session(pid)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    kill_session(pid)
    os.waitpid(pid, 0)
    return None


def session_of(leader: int) -> list[int]:
    """Every process of a session, the leader last, so that none is started while the others are counted."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            found += [int(name)] if int(fields[3]) == leader and fields[0] != "Z" else []
    return sorted(found, key=lambda pid: pid == leader)


def kill_session(leader: int) -> None:
    """Kill what is left of a command."""
    for pid in session_of(leader):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _be_the_command(request: Mapping[str, Any]) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_streams(request)
    for name in (*OF_LAUNCHERS, *OF_OTHERS):
        os.environ.pop(name, None)
    os.environ.update({"OMP_NUM_THREADS": "1", "TMPDIR": f"{request['room']}/tmp"} | request["env"])
    tempfile.tempdir, sys.dont_write_bytecode = None, True
    os.chdir(request["cwd"])
    sys.argv = ["meshwright", *request["words"]]
    os._exit(_exit_code(request["before"]))


def _open_streams(request: Mapping[str, Any]) -> None:
    paths = [request["terminal"] or f"{request['room']}/{name}" for name in ("out", "err")]
    for fd, path in zip((1, 2), paths, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(0, "r", closefd=False),
        os.fdopen(1, "w", closefd=False),
        os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False),
    )


def _exit_code(before: str) -> int:
    """What the interpreter makes of how the program ends."""
    from meshwright.cli.main import entry

    code: int = 1
    try:
        exec(before, {})
        entry()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            return 120
    return code


def script(path: Path, *words: str) -> str:
    """Code for `before`: in the command's place, what `python PATH WORDS` does once torch is imported."""
    return (
        f"import runpy, sys\nsys.argv = {[str(path), *words]!r}\nsys.path.insert(0, {str(path.parent)!r})\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\nraise SystemExit"
    )


Call = Callable[..., Result]
Words = Sequence[str]
