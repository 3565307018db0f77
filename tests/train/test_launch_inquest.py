"""Ranks without a supervisor: what the survivors read from the notice board, other hosts' ranks included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshwright.errors import RankDied
from meshwright.train import inquest
from meshwright.train.environ import Place
from meshwright.train.inquest import Inquest, Signalled, _words
from meshwright.train.lastwords import last_words
from meshwright.train.notices import Notice, NoticeBoard, own_start, state_of, this_host
from meshwright.train.pulse import Moment, Pulse, create_own_board, open_board, remove_own_board

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


@pytest.fixture
def board(monkeypatch):
    monkeypatch.setattr(inquest, "_SILENT_S", 0.3)
    monkeypatch.setattr(inquest, "PERIOD_S", 0.3)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    return NoticeBoard(store, 2, "test")


def notice(host, count=1, pid=1, started="x", path="/nowhere", step=7):
    return Notice(count, host, pid, started, path, step, "backward", 0, 0.0)


def verdict(board, error=LOST):
    return Inquest(board, Place(0, 2), _words(0, error), Moment(7, "forward")).hold()


def test_another_hosts_rank_whose_notices_stand_still_is_silent(board):
    board.post(1, notice("far away"))
    assert "rank 1 has given no sign of life" in str(verdict(board))
    assert "last seen after step 6 (in backward of microbatch 0 of step 7)" in str(verdict(board))


def test_another_hosts_rank_that_said_why_is_believed(board):
    board.post(1, notice("far away"))
    board.post_words(last_words(1, ValueError("a bad row")))
    assert "rank 1 raised ValueError: a bad row" in str(verdict(board))


def test_a_rank_that_never_came(board):
    assert "rank 1 never came to the meeting point where rank 0 waited" in str(verdict(board))


def test_a_dead_rank_of_this_host_is_placed_by_its_last_beat(board):
    path = create_own_board()
    Pulse(open_board(path)).beat(9, "optimizer")
    board.post(1, notice(this_host(), pid=os.getpid(), started="another process's", path=str(path)))
    assert "rank 1 died after step 8 (in optimizer of step 9)" in str(verdict(board))
    assert not path.exists()


def test_a_stopped_rank_of_this_host_is_named_and_ended(board):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as sleeper:
        with open(f"/proc/{sleeper.pid}/stat", encoding="ascii") as stat:
            started = stat.read().rpartition(")")[2].split()[19]
        board.post(1, notice(this_host(), pid=sleeper.pid, started=started))
        sleeper.send_signal(signal.SIGSTOP)
        while state_of(board.read()[1]) != "T":
            time.sleep(0.01)
        assert "rank 1 is stopped" in str(verdict(board))
        assert sleeper.wait(5) == -signal.SIGKILL


def test_an_end_by_the_agent_is_no_failure(board):
    board.post(1, notice(this_host(), pid=os.getpid(), started=own_start()))
    assert str(verdict(board, Signalled(signal.SIGTERM))) == "ended by SIGTERM: the last finished step is 6"
    assert str(verdict(board, KeyboardInterrupt())) == "interrupted: the last finished step is 6"


def test_one_rank_of_all_speaks(board):
    assert [board.claim("cause") for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize(("confirmed", "said"), [(True, 1), (False, 2)], ids=["in time", "killed before it spoke"])
def test_the_others_stay_until_the_cause_is_said(board, monkeypatch, capsys, confirmed, said):
    """torchrun ends all ranks once one has left: one that left before the speaker spoke would silence it."""
    monkeypatch.setattr(inquest, "_SAID_S", 1.0)
    cause = RankDied("rank 1", "was killed", "")
    assert board.claim("cause")
    other = threading.Thread(target=inquest._say_once, args=(board, cause))
    other.start()
    other.join(0.3)
    assert other.is_alive()
    inquest.say(cause)
    if confirmed:
        board.confirm("cause")
    other.join(10)
    assert not other.is_alive()
    assert capsys.readouterr().err.count("error: rank 1") == said


def test_only_our_own_boards_are_removed(tmp_path):
    other = tmp_path / "meshwright-pulse-of-a-stranger"
    other.touch()
    remove_own_board(other)
    assert other.exists()
