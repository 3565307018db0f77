"""The harness itself: values, errors and time-outs of `run_ranks`."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import NonFiniteError
from ranks import RanksFailed


def sums(world, base):
    tensor = torch.full((2,), float(base + world.rank))
    dist.all_reduce(tensor)
    return tensor


def fails_on_one(world, how):
    world.pulse.beat(step=3, phase="forward")
    if world.rank == 1:
        if how == "value":
            raise ValueError("bad row")
        if how == "ours":
            raise NonFiniteError("the loss", "it is NaN")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    dist.barrier()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_values_come_back_in_rank_order(run_ranks, n):
    expected = float(sum(range(n)) + n)
    assert [value.tolist() for value in run_ranks(n, sums, 1)] == [[expected] * 2] * n


def parent(world):
    return os.getppid()


def test_later_calls_find_a_warm_process(run_ranks):
    assert len({*run_ranks(2, parent), *run_ranks(3, parent)}) == 1


def test_a_failing_rank_gives_its_traceback(run_ranks):
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 raised ValueError: bad row.*in fails_on_one"):
        run_ranks(2, fails_on_one, "value")


def test_our_own_errors_come_back_as_they_are(run_ranks):
    with pytest.raises(NonFiniteError, match="rank 1: the loss: it is NaN"):
        run_ranks(2, fails_on_one, "ours")


def test_a_killed_rank_is_named(run_ranks):
    with pytest.raises(RanksFailed, match="rank 1 was killed by SIGKILL after step 2"):
        run_ranks(2, fails_on_one, "kill")


def test_a_call_has_a_limit(run_ranks):
    with pytest.raises(RanksFailed, match="did not end within 1 s; unfinished ranks: 0, 1"):
        run_ranks(2, fails_on_one, "sleep", limit_s=1.0)
