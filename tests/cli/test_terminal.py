"""On a terminal there is a progress bar with loss, speed and the time left; lines stand above it."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import threading
from collections.abc import Callable
from pathlib import Path

from cli.warm import Result
from cli.wrong import lay_out
from train.runs import rows

SLOW = """
import time
from mine import *
def slow(model, batch):
    time.sleep(0.02)
    return loss(model, batch)
"""


def on_a_terminal(call: Callable[..., Result], *words: str, cwd: Path) -> tuple[int | None, str]:
    """Run with stdout and stderr on a terminal of 100 columns; the code, and all that appeared there."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    seen: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(ours, 4096):
                seen.append(chunk)
        except OSError:  # the other end is closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    result = call(*words, cwd=cwd, terminal=os.ttyname(theirs))
    os.close(theirs)
    reader.join(10)
    os.close(ours)
    return result.code, b"".join(seen).decode()


def test_the_bar_shows_steps_loss_speed_and_the_time_left(meshwright, tmp_path) -> None:
    lay_out(tmp_path, {"other.py": SLOW})
    words = ("train", "r.toml", "--run-dir", "run", "--nproc", "2", "--set", "loss.build=other:slow", "train.steps=12")
    code, text = on_a_terminal(meshwright, *words, cwd=tmp_path)
    assert code == 0
    last = rows(tmp_path / "run")[-1]
    final = re.findall(r"12/12 \[(\d\d:\d\d)<(\d\d:\d\d), +[\d.]+\w+/\w+, loss ([\d.]+)  ([\d,]+) tokens/s\]", text)
    assert final and final[-1][2] == f"{last['loss']:.4f}"
    between = re.findall(r"(\d+)/12 \[\d\d:\d\d<\d\d:\d\d", text)
    assert len(set(between)) >= 3  # it moves while the run goes on
    assert "step 1/12" not in text  # no plain lines beside it
    assert re.search(r"\rmodel: Linear", text) and re.search(r"[\r\n]done: step 12 of 12", text)


def test_after_a_resume_the_bar_begins_at_the_checkpoint_in_steps(meshwright, tmp_path) -> None:
    """B049: accumulation 6, resumed at step 8: the bar says 8 of 12, not 48."""
    lay_out(tmp_path, {"other.py": SLOW})
    words = ("train", "r.toml", "--run-dir", "run", "--set", "loss.build=other:slow", "train.steps=12")
    assert meshwright(*words, "train.stop_after=8", cwd=tmp_path).code == 0
    words = (*words[:4], "--resume", *words[4:])
    code, text = on_a_terminal(meshwright, *words, cwd=tmp_path)
    assert code == 0
    shown = [int(step) for step in re.findall(r"(\d+)/12 \[", text)]
    assert shown[0] == 8 and shown[-1] == 12 and max(shown) == 12
    code, text = on_a_terminal(meshwright, *words, cwd=tmp_path)
    assert code == 0 and "nothing to do: step 12 of 12 is done" in text


def test_an_error_stands_on_a_line_of_its_own_below_the_bar(meshwright, tmp_path) -> None:
    late = (
        "from mine import *\ndone = [0]\ndef late(model, batch):\n    done[0] += 1\n"
        "    assert done[0] < 9, 'enough'\n    return loss(model, batch)\n"
    )
    lay_out(tmp_path, {"other.py": late})
    words = ("train", "r.toml", "--run-dir", "run", "--set", "loss.build=other:late")
    code, text = on_a_terminal(meshwright, *words, cwd=tmp_path)
    assert code == 4 and "Traceback" not in text
    assert re.search(r"[\r\n]error: rank 0 raised AssertionError: enough", text)
