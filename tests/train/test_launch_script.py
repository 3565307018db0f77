"""A script that calls launch: exit codes, what it prints, Ctrl-C, a killed parent, a port that is taken."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
from launched import SCRIPT
from test_launch_failures import gone, wait_until


@contextmanager
def script(*words, **env):
    """Run it; whatever happens, it is gone afterwards."""
    command = [sys.executable, str(SCRIPT), *words]
    # Its own session: a Ctrl-C of the test's terminal is not for it, and a signal to its group reaches no other.
    process = subprocess.Popen(
        command, stdout=-1, stderr=-1, text=True, env={**os.environ, **env}, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


@contextmanager
def running(tmp_path, *words):
    """Run it endlessly, from after step 2 on."""
    mark = tmp_path / "mark"
    words = ("nothing", *words, "--world", "2", "--mark", str(mark), "--pause", "0.5")
    # A parent that is killed cannot remove its temporary folder.
    with script(*words, TMPDIR=str(tmp_path)) as process:
        files = [tmp_path / f"mark-{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), 60)
        yield process, [int(file.read_text()) for file in files]


def finish(process, limit_s=60.0):
    out, err = process.communicate(timeout=limit_s)
    return process.returncode, out, err


def test_a_run_that_works_prints_nothing_of_ours():
    with script("nothing", "--world", "2") as process:
        code, out, err = finish(process)
    assert (code, err) == (0, "")
    assert out == "value {'sum': 64.0, 'launcher': 'meshwright', 'world_size': 2}\n"


def test_a_failure_is_one_line_and_our_exit_code():
    with script("kill", "1", "--world", "2") as process:
        code, _, err = finish(process)
    assert code == 4
    assert err.startswith("error: rank 1 was killed by SIGKILL after step 3")
    assert len(err.splitlines()) == 1


def test_the_traceback_is_there_for_who_asks():
    with script("raise", "1", "--world", "2", MESHWRIGHT_DEBUG="1") as process:
        _, _, err = finish(process)
    assert "in raises" in err


def test_ctrl_c_ends_it_cleanly_and_not_by_a_time_out(tmp_path):
    with running(tmp_path) as (process, ranks):
        os.killpg(process.pid, signal.SIGINT)
        code, _, err = finish(process, 15)  # half a second; a collective's time-out is 20
    assert code == 130
    assert err.startswith("interrupted: the last finished step is ")
    assert len(err.splitlines()) == 1
    assert all(gone(rank) for rank in ranks)


def test_sigterm_to_the_parent_ends_the_ranks(tmp_path):
    with running(tmp_path) as (process, ranks):
        process.terminate()
        code, _, err = finish(process, 15)
    assert code == 128 + signal.SIGTERM
    assert err.startswith("ended by SIGTERM: the last finished step is ")
    assert all(gone(rank) for rank in ranks)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_killed_parent_leaves_no_orphans(tmp_path, start):
    with running(tmp_path, "--start", start) as (process, ranks):
        process.kill()
        wait_until(lambda: all(gone(rank) for rank in ranks), 15)


def test_the_usual_port_may_be_taken():
    """B136: a second job on the host."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 29500))
        holder.listen()
        with script("nothing", "--world", "2") as process:
            assert finish(process)[0] == 0


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "4"},
            "nproc = 2 (the nproc of launch): this process already is rank 0 of WORLD_SIZE=4",
        ),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set and RANK is not"),
        ({"SLURM_NTASKS": "8"}, "SLURM_NTASKS=8 (from Slurm)"),
    ],
    ids=["nproc", "half", "slurm"],
)
def test_a_wrong_environment_is_one_line_and_exit_code_2(env, says):
    """B131, B134: a world size read too early, or another than the plan."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with script("nothing", "--world", "2", **meeting, **env) as process:
        code, _, err = finish(process)
    assert code == 2
    assert says in err
    assert len(err.splitlines()) == 1
