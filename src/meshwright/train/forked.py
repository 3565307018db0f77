"""Work that a child process of this one does, on a copy of all that this one has: what it changes is gone with it."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

import torch

from meshwright.train.native import die_with

Work = Callable[[], Any]
"""Its result is anything that JSON can say."""


@final
class Forked:
    """A child that works something out.

    Of this process's threads it has none, so the work may not touch what they work on: the network, a GPU, parallel
    kernels.

    Args:
        work: what it does; what that prints is not shown.
    """

    def __init__(self, work: Work) -> None:
        self._text, self._done = b"", False
        parent = os.getpid()
        self._read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: see above
            self._child = os.fork()
        if self._child == 0:
            os.close(self._read)
            _run(work, parent, write)
        os.close(write)

    def result(self, limit_s: float) -> tuple[Any, str]:
        """What came of it, and an empty text; or None and why there is nothing (yet).

        Args:
            limit_s: how long to wait for it.
        """
        deadline = time.monotonic() + limit_s
        while not self._done:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._read], [], [], left)[0]:
                return None, f"it was not worked out within {limit_s:g} s"
            piece = os.read(self._read, 1 << 16)
            self._text += piece
            self._done = not piece
        self.close()
        told: dict[str, Any] = json.loads(self._text) if self._text else {"because": "its process died"}
        return told.get("result"), told.get("because", "")

    def close(self) -> None:
        """End the child, if it still works."""
        if self._child:
            with suppress(OSError):
                os.kill(self._child, signal.SIGKILL)
            with suppress(OSError):
                os.waitpid(self._child, 0)
            os.close(self._read)
            self._child, self._done = 0, True


def _run(work: Work, parent: int, out: int) -> None:
    """What the child does; it never returns."""
    with suppress(BaseException):
        die_with(parent)
        torch.set_num_threads(1)
        _silence()
        try:
            told: dict[str, Any] = {"result": work()}
        except Exception as error:
            told = {"because": " ".join(str(error).split())[:500] or type(error).__name__}
        with os.fdopen(out, "wb") as pipe:
            pipe.write(json.dumps(told).encode())
    os._exit(0)


def _silence() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- as long as the process
