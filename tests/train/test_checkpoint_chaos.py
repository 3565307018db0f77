"""`meshwright train`, killed as by a power cut, again and again: the result is as if it never was."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.warm import kill_session, session_of
from cli.wrong import lay_out
from train.runs import rows, summary_of

COMMAND = str(Path(sys.executable).with_name("meshwright"))
STEPS = {1: 120, 16: 4000}
"""By kills. Enough that no attempt reaches the end before it is killed: one makes some 100 steps in its second."""


def words_of(name: str, steps: int) -> list[str]:
    sets = ["--set", f"train.steps={steps}", "checkpoint.every_steps=7", "checkpoint.keep_last=2", "optimizer.lr=1e-3"]
    return ["train", "r.toml", "--nproc", "2", "--run-dir", name, "--resume", *sets]


def start(folder: Path, name: str, steps: int) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [COMMAND, *words_of(name, steps)],
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kill_in_mid_run(folder: Path, name: str, steps: int, wait_s: float) -> bool:
    """Start or resume, wait until it trains and a moment more, and kill every process of it; False if it had ended."""
    metrics = folder / name / "metrics.jsonl"
    before = size_of(metrics)
    process = start(folder, name, steps)
    try:
        deadline = time.monotonic() + 60
        while (size := size_of(metrics)) <= before and process.poll() is None and time.monotonic() < deadline:
            before = min(before, size)  # it is cut at the checkpoint first, before it says where it resumes
            time.sleep(0.005)
        time.sleep(wait_s)
        alive = process.poll() is None
    finally:
        kill_session(process.pid)
        process.wait(10)
    while session_of(process.pid):  # killed processes take a moment to go
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return alive


@pytest.mark.parametrize("kills", [1, pytest.param(16, marks=pytest.mark.chaos)])
def test_a_training_killed_at_random_times_ends_with_the_weights_of_one_that_was_not(
    meshwright, tmp_path, kills
) -> None:
    """B056: SIGKILL to every process at once, in the middle of steps, saves and starts."""
    lay_out(tmp_path, {})
    moments, killed = random.Random(kills), 0
    while killed < kills:
        killed += kill_in_mid_run(tmp_path, "killed", STEPS[kills], moments.uniform(0.0, 0.6))
        assert not (tmp_path / "killed/summary.json").exists(), "it came to its end before it was killed enough"
    # What nobody kills needs no session of its own, and so no import of torch of its own.
    last, whole = (
        meshwright(*words_of(name, STEPS[kills]), cwd=tmp_path, limit_s=120.0) for name in ("killed", "whole")
    )
    assert (last.code, whole.code) == (0, 0), last.out + last.err + whole.out + whole.err
    log = (tmp_path / "killed.log").read_text() + last.out + last.err
    assert log.count("resume: ") == kills + 1 and "Traceback" not in log
    assert summary_of(tmp_path / "killed") == summary_of(tmp_path / "whole")
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
