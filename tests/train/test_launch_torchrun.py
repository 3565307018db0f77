"""The same script under torchrun, on one node and on two: no supervisor of ours, the same answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest
from launched import BAD_STEP, SCRIPT
from test_launch_failures import wait_until

AFTER = f"after step {BAD_STEP - 1} (in forward of microbatch 2 of step {BAD_STEP})"


@contextmanager
def torchrun(words, options):
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=env, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            # The agent ends its ranks, which are in sessions of their own.
            process.terminate()
        try:
            process.communicate(timeout=45)
        except subprocess.TimeoutExpired:
            process.kill()


def own_lines(err):
    return [line for line in err.splitlines() if line.startswith(("error: ", "interrupted", "ended by"))]


def on_one_node(*words, nproc=2):
    options = ["--standalone", "--nproc-per-node", str(nproc)]
    with torchrun(words, options) as process:
        out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def on_two_nodes(*words, backend):
    """One rank on each of two 'nodes', which are two agents on this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meet = {
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "test"],
        "static": ["--master-addr", "127.0.0.1", "--master-port", str(port)],
    }[backend]
    with ExitStack() as stack:
        agents = [
            stack.enter_context(torchrun(words, ["--nnodes", "2", "--node-rank", str(node), *meet]))
            for node in range(2)
        ]
        ends = [agent.communicate(timeout=120) for agent in agents]
    return [agent.returncode for agent in agents], "".join(out for out, _ in ends), "".join(err for _, err in ends)


def test_a_run_that_works():
    code, out, err = on_one_node("nothing", "--world", "2")
    assert code == 0
    assert out.splitlines() == ["value {'sum': 64.0, 'launcher': 'torchrun', 'world_size': 2}"] * 2
    assert err == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        # The kernel tells the signal only until torchrun has taken note of the death, which may come first.
        (
            ["kill", "0"],
            (f"rank 0 was killed by SIGKILL {AFTER}", f"rank 0 died {AFTER}: it left no word, so something"),
        ),
        pytest.param(
            ["raise", "1"], f"rank 1 raised ValueError: a bad row; {AFTER}, at launched.py:", marks=pytest.mark.chaos
        ),
        pytest.param(
            ["return", "1"], f"rank 1 left the process group after step {BAD_STEP} while", marks=pytest.mark.chaos
        ),
        (["stop", "1", "--timeout", "3"], f"rank 1 is stopped: its process is in state T (SIGSTOP); last seen {AFTER}"),
        pytest.param(["hang", "0", "--timeout", "3"], "rank 0 hangs: it is alive", marks=pytest.mark.chaos),
        pytest.param(["spec", "-1"], "train.seed: it is odd Try 2.", marks=pytest.mark.chaos),
        pytest.param(["early-error"], "train.seed: it is odd Try 2.", marks=pytest.mark.chaos),
        (
            ["nothing", "--world", "3"],
            "this process already is rank 0 of WORLD_SIZE=2 (from the environment, set by torch",
        ),
        (["nothing", "--world", "3", "--first-late", "2"], "this process already is rank 0 of WORLD_SIZE=2"),
        (["early-error", "--first-late", "2"], "train.seed: it is odd Try 2."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_one_rank_says_who_failed(words, says):
    """torchrun ends all ranks once one has ended: also one that is late must come to say what it found."""
    start = time.monotonic()
    code, _, err = on_one_node(*words)
    assert code == 1, "torchrun's own"
    (line,) = own_lines(err)
    assert any(said in line for said in ((says,) if isinstance(says, str) else says))
    assert "Connection closed" not in err
    assert time.monotonic() - start < 30, "torchrun waits 30 s for ranks that do not take its SIGTERM"


@pytest.mark.chaos
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_nodes_that_work(backend):
    codes, out, _ = on_two_nodes("nothing", backend=backend)
    assert codes == [0, 0]
    assert out.count("'world_size': 2") == 2


def test_a_rank_is_killed_on_the_other_node():
    codes, _, err = on_two_nodes("kill", "1", backend="static")
    assert codes == [1, 1]
    (line,) = own_lines(err)
    assert line.startswith((f"error: rank 1 was killed by SIGKILL {AFTER}", f"error: rank 1 died {AFTER}"))


@pytest.mark.chaos
def test_ctrl_c_is_one_line(tmp_path):
    mark = tmp_path / "mark"
    words = ["nothing", "--mark", str(mark), "--pause", "0.5"]
    with torchrun(words, ["--standalone", "--nproc-per-node", "2"]) as process:
        wait_until(lambda: all((tmp_path / f"mark-{rank}").exists() for rank in range(2)), 60)
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, err = process.communicate(timeout=45)
        assert time.monotonic() - start < 10
    assert own_lines(err)[0].startswith(("interrupted: the last", "ended by SIGTERM: the last"))
    assert len(own_lines(err)) == 1
