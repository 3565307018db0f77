"""Six small things that torch and the kernel offer only below Python. Each does nothing where it is not available."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_OMP_PAUSE_HARD: Final = 2
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_MMAP_THRESHOLD: Final = 32 << 20
_LARGEST_INT: Final = (1 << 31) - 1
_LOG_LEVEL: Final = "TORCH_CPP_LOG_LEVEL"
_READ_LOG_LEVEL: Final = ("libc10.so", "_ZN3c1011initLoggingEv")


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent goes, however it goes (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        # It went before the kernel knew.
        os._exit(4)


def release_openmp_threads() -> None:
    """End the idle threads of the OpenMP pool before a fork.

    A process that is forked from a used pool believes in threads that it does not have, and hangs at its first parallel
    operation. The pool is made anew when this process needs it again.
    """
    _call_loaded("libgomp", "omp_pause_resource_all", _OMP_PAUSE_HARD)


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, for the next step to use: a step frees what the next one allocates.

    Given back, every page of the activations is mapped and zeroed anew in each step. By default the limits follow the
    sizes that a process happens to free, so that one rank may pay for it and its neighbour not.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)


def settle_torch() -> None:
    """Apply the variables that torch reads once, at its import, which in a forked rank was too early."""
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))
    quiet_torch()


def quiet_torch() -> None:
    """Keep the warnings of torch's C++ parts off stderr, unless the user wants another level (TORCH_CPP_LOG_LEVEL).

    When a rank fails its neighbours' sockets have much to say, and none of it is the cause.
    """
    os.environ.setdefault(_LOG_LEVEL, "ERROR")
    _call_loaded(*_READ_LOG_LEVEL)


@contextmanager
def hushed_torch() -> Iterator[None]:
    """The same for a while, whatever the user wants of the rest."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = "ERROR"
    _call_loaded(*_READ_LOG_LEVEL)
    try:
        yield
    finally:
        os.environ[_LOG_LEVEL] = before or "WARNING"  # torch's own; without a word the level would stay
        _call_loaded(*_READ_LOG_LEVEL)
        if before is None:
            del os.environ[_LOG_LEVEL]


def _call_loaded(library: str, function: str, *arguments: int) -> None:
    """Call a function of a library that this process has loaded."""
    with suppress(OSError, AttributeError, StopIteration), open("/proc/self/maps", encoding="utf-8") as maps:
        path = next(line.split(maxsplit=5)[-1].strip() for line in maps if library in line)
        getattr(ctypes.CDLL(path), function)(*arguments)
