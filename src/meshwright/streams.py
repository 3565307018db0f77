"""Lines for the user: whole among those of other ranks, and no trouble once their reader has left."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


def write_line(stream: TextIO, line: str) -> None:
    """One write, so that lines of other ranks do not mix in: under torchrun (`python -u`) print makes two of them."""
    stream.write(f"{line}\n")
    stream.flush()


def discard_stdout() -> None:
    """Send what is still to be printed nowhere: the interpreter flushes once more at its end, and would complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
