"""Lines for the user: whole among those of other ranks, said once, and no trouble once their reader has left."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import Final, TextIO

_PATIENCE_S: Final = 15.0


def write_line(stream: TextIO, line: str) -> None:
    """One write, so that lines of other ranks do not mix in: under torchrun (`python -u`) print makes two of them."""
    stream.write(f"{line}\n")
    stream.flush()


def wait_for_first_of_node() -> None:
    """Before an error that every rank of a node finds by itself: let the node's first rank be the one to say it.

    The launcher ends all ranks once one has ended. So the others stay until they are told to go: were they to leave at
    once, the first might be ended before it spoke. One that nobody ends alone has the error, and goes on to say it.
    """
    # A launcher that gives no LOCAL_RANK has one node, as train/environ.py reads it too. What is no number is nobody's.
    rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    if rank.isdecimal() and int(rank) > 0:
        with suppress(KeyboardInterrupt):
            time.sleep(_PATIENCE_S)


def discard_stdout() -> None:
    """Send what is still to be printed nowhere: the interpreter flushes once more at its end, and would complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
