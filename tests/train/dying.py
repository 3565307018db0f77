"""A saver that is killed at a chosen moment: at each thing that it does to the disk there is one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from meshwright.train.tensorfile import TensorWriter

TOUCHES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "shutil.rmtree")


@contextmanager
def moments(below: Path, at: Callable[[str], None]) -> Iterator[None]:
    """Call `at` before everything that changes a file or folder below, and in the middle of writing tensors.

    The interpreter's audit events are the list of moments, so that none is forgotten. A hook cannot be taken off again:
    it is deaf after the block, and only for processes that end soon.
    """
    hears = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not hears or (event != "open" and event not in TOUCHES):
            return
        if event == "open" and not (
            str(arguments[0]).startswith(str(below)) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            return
        at(f"{event} {Path(str(arguments[0])).name}")

    def half_written(writer: TensorWriter, tensor: Any) -> None:
        add(writer, tensor)
        if not writer._open:  # the last of the file
            writer._file.flush()
            whole = writer.path.read_bytes()
            os.ftruncate(writer._file.fileno(), len(whole) // 2)
            at(f"half {writer.path.name}")
            writer._file.seek(0)
            writer._file.write(whole)

    def synced(fd: int) -> None:
        at(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    fsync, add = os.fsync, TensorWriter.add
    sys.addaudithook(hook)
    with mock.patch.object(TensorWriter, "add", half_written), mock.patch("os.fsync", synced):
        yield
    hears = False


def killer(moment: int) -> Callable[[str], None]:
    """For `moments`: kill this process at the n-th one, from 0."""
    left = [moment]

    def at(what: str) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    return at


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; 0 if it returned, -9 if it was killed, 1 if it raised."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def moments_of(below: Path, work: Callable[[], None]) -> list[str]:
    """What `work` does, in order; done in a child."""
    out, into = os.pipe()

    def recorded() -> None:
        with moments(below, lambda what: void(os.write(into, f"{what}\n".encode()))):
            work()

    code = in_child(recorded)
    os.close(into)
    with open(out, encoding="utf-8") as file:
        lines = file.read().splitlines()
    assert code == 0
    return lines


def void(value: object) -> None:
    """Nothing."""


def die_at(below: Path, moment: int, work: Callable[[], None]) -> int:
    """Do `work` in a child that is killed at the n-th moment."""

    def deadly() -> None:
        with moments(below, killer(moment)):
            work()

    return in_child(deadly)
