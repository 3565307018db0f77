"""The environment of a rank: what is accepted, and what is refused with every variable and its value."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshwright.errors import SpecError
from meshwright.train.environ import Place, check_nproc, read_place, read_timeout_s
from meshwright.train.launch import launch
from meshwright.train.world import join_world

MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_no_launcher_is_no_place():
    assert read_place({}) is None
    assert read_place({"SLURM_NTASKS": "1"}) is None


def test_torchruns_variables():
    environ = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "TORCHELASTIC_RUN_ID": "none",
    }
    assert read_place(environ | MEET) == Place(5, 8, 1, 4, 1, "torchrun")


def test_the_two_that_every_launcher_sets_are_enough():
    assert read_place({"RANK": "1", "WORLD_SIZE": "2"} | MEET) == Place(1, 2, 1, 2, 0, "environment")
    assert read_place({"RANK": "0", "WORLD_SIZE": "1"}) == Place(launcher="environment")


WRONG = [
    ({"WORLD_SIZE": "8"}, ["WORLD_SIZE=8 is set and RANK is not"]),
    ({"RANK": "0"}, ["RANK=0 is set and WORLD_SIZE is not"]),
    ({"LOCAL_RANK": "0"}, ["LOCAL_RANK=0 is set and RANK and WORLD_SIZE is not"]),
    ({"RANK": "x", "WORLD_SIZE": "2"} | MEET, ["RANK='x' is not an integer"]),
    ({"RANK": "", "WORLD_SIZE": "2.0"} | MEET, ["RANK='' is not an integer", "WORLD_SIZE='2.0' is not an integer"]),
    ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | MEET, ["RANK=2 is not below WORLD_SIZE=2"]),
    ({"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | MEET, ["RANK=-1 is below 0"]),
    ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0 is below 1"]),
    (
        {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"} | MEET,
        ["LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"],
    ),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"} | MEET, ["LOCAL_WORLD_SIZE=4 is above WORLD_SIZE=2"]),
    ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR is not set", "MASTER_PORT is not set"]),
    ({"RANK": "0", "WORLD_SIZE": "2"} | MEET | {"MASTER_PORT": "99999"}, ["MASTER_PORT=99999 is not a port"]),
    ({"SLURM_NTASKS": "8"}, ["SLURM_NTASKS=8 (from Slurm) and WORLD_SIZE is not set"]),
]


@pytest.mark.parametrize(("environ", "says"), WRONG, ids=[says[0][:30] for _, says in WRONG])
def test_contradictions_are_refused_together(environ, says):
    with pytest.raises(SpecError) as caught:
        read_place(environ)
    for text in says:
        assert text in str(caught.value)
    assert len(caught.value.faults) >= len(says)
    assert caught.value.exit_code == 2


def test_nproc_that_is_not_the_worlds():
    check_nproc(None, Place(0, 8))
    check_nproc(8, Place(0, 8))
    with pytest.raises(SpecError, match=r"nproc = 3 .*WORLD_SIZE=1 .*set by torchrun"):
        check_nproc(3, Place(0, 1, launcher="torchrun"))


@pytest.mark.parametrize("nproc", [0, -1, 2.0, True, "2"])
def test_nproc_that_is_no_number_of_ranks(nproc):
    with pytest.raises(SpecError, match="integer from 1"):
        launch(lambda: None, nproc)


def test_what_cannot_be_imported_cannot_be_spawned():
    with pytest.raises(SpecError, match="fresh interpreters find main by its name"):
        launch(lambda: None, 2, start="spawn")


def test_the_timeout_comes_from_the_launcher():
    assert read_timeout_s({"MESHWRIGHT_TIMEOUT_S": "7.5"}) == 7.5
    assert read_timeout_s({}) == 50.0


def test_the_launcher_itself_needs_no_torch():
    code = "import sys, meshwright.train.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_world_of_one_needs_no_launcher_and_no_store(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        with join_world(device="cpu") as world:
            assert (world.rank, world.world_size, world.launcher) == (0, 1, "none")
            world.pulse.beat(3, "forward")
    with pytest.raises(KeyError), join_world(device="cpu"):
        raise KeyError("the group is left also after an error")
    with join_world(device="cpu"):
        pass
