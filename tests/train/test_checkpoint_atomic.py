"""Saving is atomic: a kill at any moment leaves the last good checkpoint, and the next run needs no help."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from meshwright.errors import MeshwrightError
from meshwright.spec.load import from_table
from meshwright.train import stored
from meshwright.train.run import run_recipe
from ranks import RanksFailed
from train.dying import die_at, in_child, killer, moments, moments_of
from train.runs import changed, rows, run_in, save_tiny, steps_in, summary_of
from train.test_resume_position import numbers_table


def third_of_two_kept(home: Path) -> Callable[[], Any]:
    """Two are kept, the third pushes out the first."""
    for step in (1, 2):
        save_tiny(home, step, keep_last=2)
    return partial(save_tiny, home, 3, keep_last=2)


def over_a_torn_one(home: Path) -> Callable[[], Any]:
    """Step 3 was torn and passed by; it is saved again over it."""
    for step in (1, 2, 3):
        save_tiny(home, step, keep_last=3)
    (home / "step-00000003/model.safetensors").write_bytes(b"torn")
    return partial(save_tiny, home, 3, keep_last=2)


def the_only_one(home: Path) -> Callable[[], Any]:
    """With keep_last = 1 there is one good checkpoint at every moment."""
    save_tiny(home, 2, keep_last=1)
    return partial(save_tiny, home, 3, keep_last=1)


def among_leftovers(home: Path) -> Callable[[], Any]:
    """What other versions or hands may have left."""
    save_tiny(home, 2)
    (home / ".step-00000003.writing/deep").mkdir(parents=True)
    (home / ".step-00000003.writing/model.safetensors").write_bytes(b"half")
    (home / ".step-00000001.old").write_text("a file, not a folder")
    return partial(save_tiny, home, 3, keep_last=2)


SCENES = [third_of_two_kept, over_a_torn_one, the_only_one, among_leftovers]


@pytest.mark.parametrize("scene", SCENES, ids=[scene.__name__ for scene in SCENES])
def test_a_kill_at_any_moment_of_saving_leaves_a_good_checkpoint(tmp_path, scene) -> None:
    """B056: the moments are all that the saver does to the disk, the middle of each file among them."""
    done = moments_of(tmp_path, scene(tmp_path / "all/checkpoints"))
    assert len(done) > 12 and "half model.safetensors" in done
    for moment, what in enumerate(done):
        home = tmp_path / str(moment) / "checkpoints"
        assert die_at(tmp_path, moment, scene(home)) == -9, what
        check_survivors(home, what)
        save_tiny(home, 4, keep_last=2)
        assert steps_in(home)[-1] == 4 and len(steps_in(home)) <= 2 + (scene is over_a_torn_one), what
        assert not [path.name for path in home.iterdir() if path.name.startswith(".")], what


def check_survivors(home: Path, what: str) -> None:
    """The newest good one is of step 2 or 3, holds that step's weights, and no line is needed but for a torn step 3."""
    found, passed = stored.newest_good(home.parent, hashes=True)
    assert found is not None and found.step in (2, 3), what
    weights = load_file(found.path / "model.safetensors")
    assert {float(value) for value in weights["weight"].flatten()} == {0.0 + found.step}, what
    assert all("step-00000003" in line for line in passed), what
    whole = [path for path in stored.candidates(home) if stored.is_whole(path)]
    assert len(whole) + len(passed) == len(stored.candidates(home)), what


def test_everything_is_on_the_disk_before_its_name_is(tmp_path) -> None:
    """A rename may reach the disk before the data: each file is forced there first, and the rename after."""
    done = moments_of(tmp_path, third_of_two_kept(tmp_path / "checkpoints"))
    at = done.index("os.rename .step-00000003.writing")
    files = ("model.safetensors", "optimizer.safetensors", "manifest.json", ".step-00000003.writing")
    assert sorted(done[:at][-9:]).count("fsync manifest.json") == 1
    assert {f"fsync {name}" for name in files} <= set(done[:at])
    assert done[at + 1] == "fsync checkpoints"
    assert not [what for what in done[:at] if "step-00000001" in what or "step-00000002" in what]


def test_files_of_a_checkpoint_have_the_rights_that_the_umask_gives(tmp_path) -> None:
    path = save_tiny(tmp_path / "checkpoints", 1)
    assert (
        len({(path / name).stat().st_mode for name in ("model.safetensors", "optimizer.safetensors", "manifest.json")})
        == 1
    )


def killed_run(world: Any, table: dict[str, Any], folder: str, moment: int, resume: bool) -> None:
    """A run whose rank 0 is killed at the n-th moment of all its saving."""
    home = Path(folder) / "checkpoints"
    watch = moments(home, killer(moment)) if world.rank == 0 else contextlib.nullcontext()
    with watch:
        run_recipe(from_table(table), Path(folder), resume=resume, world=world)


def count_moments(world: Any, table: dict[str, Any], folder: str) -> list[str]:
    seen: list[str] = []
    with moments(Path(folder) / "checkpoints", seen.append):
        run_recipe(from_table(table), Path(folder), resume=False, world=world)
    return seen


RUN = numbers_table(4, 5, checkpoint={"every_steps": 1, "keep_last": 2})


@pytest.fixture(scope="module")
def whole_run(run_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    (seen,) = run_ranks(1, count_moments, RUN, str(folder / "1"))
    run_ranks(2, run_in, RUN, str(folder / "2"))
    return folder / "2", seen


def die_and_resume(run_ranks, folder: Path, moment: int, whole: Path) -> str:
    """What the resumed run says about where it begins."""
    with pytest.raises((RanksFailed, MeshwrightError), match="rank 0 was killed by SIGKILL"):
        run_ranks(2, killed_run, RUN, str(folder), moment, False)
    told = run_ranks(2, run_in, RUN, str(folder), True)[0]
    assert rows(folder) == rows(whole)
    assert summary_of(folder) == summary_of(whole)
    assert steps_in(folder) == [4, 5] and not list((folder / "checkpoints").glob(".*"))
    return next(line for line in told.out.splitlines() if line.startswith("resume: "))


def test_a_run_killed_while_it_saves_resumes_by_itself(run_ranks, whole_run, tmp_path) -> None:
    """B056: at the first save, in the third, while the fourth pushes out the second, after the last is published."""
    whole, seen = whole_run
    fourth, last = (seen.index(f"os.rename .step-0000000{step}.writing") for step in (4, 5))
    third = [i for i, what in enumerate(seen) if what == "half optimizer.safetensors"][2]
    moments_of_death = (3, third, fourth, fourth + 3, last + 1)
    lines = [die_and_resume(run_ranks, tmp_path / str(moment), moment, whole) for moment in moments_of_death]
    assert "no checkpoint yet" in lines[0]
    assert [f"step {step} from" in line for step, line in zip((2, 3, 4, 5), lines[1:], strict=True)] == [True] * 4


@pytest.mark.chaos
def test_a_run_killed_at_any_moment_of_its_saving_resumes_by_itself(run_ranks, whole_run, tmp_path) -> None:
    """B056, whole"""
    whole, seen = whole_run
    for moment in range(len(seen)):
        die_and_resume(run_ranks, tmp_path / str(moment), moment, whole)


def test_two_deaths_in_a_row_do_not_add_up(run_ranks, whole_run, tmp_path) -> None:
    whole, _ = whole_run
    for moment, resume in ((40, False), (25, True)):
        with pytest.raises((RanksFailed, MeshwrightError), match="SIGKILL"):
            run_ranks(2, killed_run, RUN, str(tmp_path), moment, resume)
    run_ranks(2, run_in, RUN, str(tmp_path), True)
    assert summary_of(tmp_path) == summary_of(whole)


@pytest.mark.parametrize("leftover", ["hidden folder", "hidden file", "torn folder", "file of that name"])
def test_a_leftover_made_by_hand_does_not_break_the_next_save_on_two_ranks(run_ranks, tmp_path, leftover) -> None:
    """B057"""
    home = tmp_path / "checkpoints"
    hidden, named = home / ".step-00000002.writing", home / "step-00000002"
    run_ranks(2, run_in, changed(RUN, train={"stop_after": 1}), str(tmp_path))
    match leftover:
        case "hidden folder":
            (hidden / "model.safetensors").mkdir(parents=True)
        case "hidden file":
            hidden.write_text("half")
        case "torn folder":
            named.mkdir()
            (named / "model.safetensors").write_bytes(b"half")
        case _:
            named.write_text("half")
    told = run_ranks(2, run_in, RUN, str(tmp_path), True)
    assert ("passed by" in told[0].out) == (leftover in ("torn folder", "file of that name"))
    assert "resume: step 1 from" in told[0].out
    assert steps_in(tmp_path) == [4, 5] and not list(home.glob(".*"))
    assert all(stored.is_whole(path) for path in stored.candidates(tmp_path))


def slow_folders(world: Any, table: dict[str, Any], folder: str) -> dict[str, Any]:
    """Rank 0 takes its time to make each folder."""
    import time

    make = Path.mkdir

    def slowly(self: Path, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.4 if world.rank == 0 else 0.0)
        make(self, *args, **kwargs)

    Path.mkdir = slowly  # type: ignore[method-assign]  # this process ends with the run
    return run_recipe(from_table(table), Path(folder), resume=False, world=world)


def test_no_rank_writes_before_rank_0_has_made_the_folder(run_ranks, tmp_path) -> None:
    """B061"""
    run_ranks(3, slow_folders, numbers_table(6, 1), str(tmp_path / "run"))
    assert steps_in(tmp_path / "run") == [1]


def test_keep_last_never_removes_the_last_good_one_for_the_sake_of_torn_ones(tmp_path) -> None:
    home = tmp_path / "checkpoints"
    for step in (5, 10, 15, 20):
        save_tiny(home, step)
    (home / "step-00000010/model.safetensors").write_bytes(b"cut")
    flipped = home / "step-00000015/model.safetensors"
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)  # its size is right
    shutil.rmtree(home / "step-00000020")
    (home / "step-00000020").mkdir()
    (home / "step-00000099").mkdir()
    found, passed = stored.newest_good(tmp_path, hashes=True)
    assert found is not None and found.step == 5 and len(passed) == 4
    save_tiny(home, 7, keep_last=1)
    found, _ = stored.newest_good(tmp_path, hashes=True)
    assert found is not None and found.step == 7
    assert steps_in(home) == [7, 10, 15, 20, 99]  # later steps are for the saves that reach them
    save_tiny(home, 10, keep_last=2)
    assert steps_in(home) == [7, 10, 15, 20, 99]
    save_tiny(home, 15, keep_last=1)
    assert steps_in(home) == [15, 20, 99]


def test_keep_last_counts_whole_ones_alone(tmp_path) -> None:
    home = tmp_path / "checkpoints"
    for step in (5, 6):
        save_tiny(home, step)
    (home / "step-00000006/model.safetensors").write_bytes(b"cut")
    save_tiny(home, 8, keep_last=2)
    assert steps_in(home) == [5, 6, 8]
    save_tiny(home, 9, keep_last=2)
    assert steps_in(home) == [6, 8, 9]


def test_steps_of_nine_digits_are_newer_than_those_of_eight(tmp_path) -> None:
    home = tmp_path / "checkpoints"
    for step in (99_999_998, 99_999_999, 100_000_000, 100_000_001):
        save_tiny(home, step, keep_last=2)
    assert steps_in(home) == [100_000_000, 100_000_001]
    found, _ = stored.newest_good(tmp_path, hashes=True)
    assert found is not None and found.step == 100_000_001


def test_a_child_that_is_killed_is_seen_as_killed() -> None:
    """The tests above rest on it."""
    assert [in_child(lambda: None), in_child(lambda: 1 / 0)] == [0, 1]
    assert die_at(Path("/nowhere"), 0, lambda: Path("/nowhere/x").mkdir()) == -9
