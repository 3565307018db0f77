"""Torn checkpoints are passed by with a line that says which and why; errors while saving reach every rank."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import CheckpointError
from meshwright.spec.load import from_table
from meshwright.train import checkpoint, stored, tensorfile
from meshwright.train.run import begin_run, run_recipe
from meshwright.train.run_folder import find_start
from ranks import RanksFailed
from train.runs import TINY_RECIPE, changed, rows, run_in, save_tiny, steps_in, summary_of, tree_hash
from train.test_resume_position import numbers_table

NAME = "step-00000030"
MODEL, OPTIMIZER, MANIFEST = "model.safetensors", "optimizer.safetensors", "manifest.json"


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest as a hand would, its seal not renewed."""
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def reseal(path: Path, **changes: Any) -> None:
    """Change a manifest as another program would, its seal renewed."""
    manifest = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(manifest | {stored.SEAL: stored.seal(manifest)}))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def rename_away(folder: Path) -> None:
    """Step 25 under the name of step 30."""
    shutil.rmtree(folder)
    save_tiny(folder.parent, 25).rename(folder)


TEARS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "manifest missing": (lambda f: (f / MANIFEST).unlink(), "has no manifest.json"),
    "manifest empty": (lambda f: (f / MANIFEST).write_text(""), "broken manifest.json"),
    "manifest half": (lambda f: os.truncate(f / MANIFEST, 200), "broken manifest.json"),
    "manifest not JSON": (lambda f: (f / MANIFEST).write_text("step = 30"), "broken manifest.json"),
    "manifest not UTF-8": (lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe{}"), "broken manifest.json"),
    "manifest a list": (lambda f: (f / MANIFEST).write_text("[1, 2]"), "broken manifest.json"),
    "manifest null": (lambda f: (f / MANIFEST).write_text("null"), "broken manifest.json"),
    "manifest too deep": (lambda f: (f / MANIFEST).write_text("[" * 99_999), "broken manifest.json"),
    "manifest a folder": (lambda f: replace_by_folder(f / MANIFEST), "cannot be read: Is a directory"),
    "another format": (lambda f: reseal(f / MANIFEST, format=2), "is of format 2; this version reads format 1"),
    "a format of words": (lambda f: reseal(f / MANIFEST, format="new"), "is of format new"),
    "a number edited": (lambda f: edit(f / MANIFEST, lambda m: m.update(tokens=7)), "differs from its own SHA-256"),
    "the recipe edited": (
        lambda f: edit(f / MANIFEST, lambda m: m["recipe"]["optimizer"].update(lr=9.0)),
        "differs from its own SHA-256",
    ),
    "no file listed": (lambda f: edit(f / MANIFEST, lambda m: m.update(files={})), "differs from its own SHA-256"),
    "seal removed": (lambda f: edit(f / MANIFEST, lambda m: m.pop(stored.SEAL)), "differs from its own SHA-256"),
    "model missing": (lambda f: (f / MODEL).unlink(), "lacks model.safetensors"),
    "optimizer missing": (lambda f: (f / OPTIMIZER).unlink(), "lacks optimizer.safetensors"),
    "model a folder": (lambda f: replace_by_folder(f / MODEL), "lacks model.safetensors"),
    "model cut": (lambda f: os.truncate(f / MODEL, 50), r"has 50 of \d+ bytes of model.safetensors"),
    "optimizer longer": (
        lambda f: (f / OPTIMIZER).write_bytes((f / OPTIMIZER).read_bytes() + b"x"),
        "bytes of optimizer.safetensors",
    ),
    "model's last bit": (lambda f: flip(f / MODEL, -1), "model.safetensors that differs from its SHA-256"),
    "model's first bit": (lambda f: flip(f / MODEL, 0), "model.safetensors that differs from its SHA-256"),
    "optimizer's bit": (lambda f: flip(f / OPTIMIZER, -9), "optimizer.safetensors that differs from its SHA-256"),
    "empty folder": (lambda f: (shutil.rmtree(f), f.mkdir()), "has no manifest.json"),
    "a file": (lambda f: (shutil.rmtree(f), f.write_text("x")), "cannot be read: Not a directory"),
    "a link to nowhere": (lambda f: (shutil.rmtree(f), f.symlink_to("nowhere")), "has no manifest.json"),
    "another step's": (rename_away, "holds step 25"),
}
BY_HASH = ("model's last bit", "model's first bit", "optimizer's bit")


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_newest_checkpoint_is_passed_by_with_a_line(tmp_path, tear) -> None:
    for step in (10, 20, 30):
        save_tiny(tmp_path / "checkpoints", step)
    tearing, words = TEARS[tear]
    tearing(tmp_path / "checkpoints" / NAME)
    before = tree_hash(tmp_path)
    start = find_start(tmp_path, from_table(TINY_RECIPE), resume=True, hashes=True)
    assert start.step == 20 and len(start.lines) == 2
    assert re.search(rf"^passed by: checkpoint .*{NAME}: .*{words}", start.lines[0])
    assert start.lines[1] == f"resume: step 20 from {tmp_path}/checkpoints/step-00000020"
    quick = find_start(tmp_path, from_table(TINY_RECIPE), resume=True, hashes=False)
    assert quick.step == (30 if tear in BY_HASH else 20)
    assert tree_hash(tmp_path) == before


@pytest.mark.parametrize("tear", TEARS)
def test_where_all_are_torn_nothing_is_guessed_and_nothing_is_changed(tmp_path, tear) -> None:
    for step in (25, 30) if tear != "another step's" else (30,):
        folder = save_tiny(tmp_path / "checkpoints", step)
        TEARS[tear][0](folder)
    before = tree_hash(tmp_path)
    with pytest.raises(CheckpointError, match=f"has no whole checkpoint:\n.*{NAME}") as caught:
        find_start(tmp_path, from_table(TINY_RECIPE), resume=True, hashes=True)
    assert caught.value.exit_code == 5
    assert str(caught.value).count("passed by") == len(steps_in(tmp_path))
    assert "Nothing was changed. Start anew in another --run-dir." in str(caught.value)
    assert tree_hash(tmp_path) == before


def test_any_flipped_byte_of_any_file_is_found(tmp_path) -> None:
    good = save_tiny(tmp_path / "good", 30)
    random_bytes = random.Random(0)
    for name in (MODEL, OPTIMIZER, MANIFEST):
        size = (good / name).stat().st_size
        for at in [0, size - 1, *random_bytes.sample(range(size), 60)]:
            home = tmp_path / "torn"
            shutil.rmtree(home, ignore_errors=True)
            shutil.copytree(good, home / NAME)
            flip(home / NAME / name, at)
            found, passed = stored.newest_good(home, hashes=True)
            assert found is None and len(passed) == 1, (name, at)


def test_a_torn_newest_one_costs_two_ranks_its_steps_and_nothing_else(run_ranks, tmp_path) -> None:
    table = numbers_table(4, 6, checkpoint={"every_steps": 2})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_ranks(2, run_in, table, str(whole))
    shutil.copytree(whole, cut)
    flip(cut / "checkpoints/step-00000006" / OPTIMIZER, -1)
    (cut / "checkpoints/step-00000099").mkdir()
    told = run_ranks(2, run_in, table, str(cut), True)[0]
    assert len(re.findall("^passed by: ", told.out, re.MULTILINE)) == 2
    assert "resume: step 4 from" in told.out
    assert rows(cut) == rows(whole) and summary_of(cut) == summary_of(whole)
    assert steps_in(cut) == [2, 4, 6, 99]
    assert stored.is_whole(cut / "checkpoints/step-00000006")


def breaking(world: Any, table: dict[str, Any], folder: str, deed: str, step: int) -> None:
    """A run in which saving a step goes wrong on rank 0."""
    path = Path(folder)
    begin = checkpoint._begin

    def breaks(home: Path, beside: Path) -> None:
        if str(step) in beside.name:
            break_by(deed, path)
        begin(home, beside)

    checkpoint._begin = breaks  # this process ends with the run
    run_recipe(from_table(table), path, resume=False, world=world)


def break_by(deed: str, folder: Path) -> None:
    def fails(number: int) -> Any:
        def raw(tensor: torch.Tensor) -> bytes:
            raise OSError(number, os.strerror(number))

        return raw

    match deed:
        case "full disk":
            tensorfile._raw = fails(errno.ENOSPC)
        case "bad disk":
            tensorfile._raw = fails(errno.EIO)
        case "bug":
            tensorfile._raw = lambda tensor: 1 / 0
        case "file in the way":
            (folder / "checkpoints").rename(folder / "elsewhere")
            (folder / "checkpoints").write_text("")


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("full disk", "No space left on device"),
        ("bad disk", "Input/output error"),
        ("file in the way", "File exists|Not a directory"),
    ],
)
def test_an_error_of_rank_0_while_saving_reaches_all_ranks_in_seconds(run_ranks, tmp_path, deed, words) -> None:
    table = numbers_table(6, 6, checkpoint={"every_steps": 1})
    begin = time.perf_counter()
    with pytest.raises(CheckpointError, match=words) as caught:
        run_ranks(3, breaking, table, str(tmp_path), deed, 3)
    assert time.perf_counter() - begin < 20.0  # a hang would take the time-out of 20 s and more; seen: 1 s
    assert caught.value.exit_code == 5
    assert "step-00000003: could not be written" in str(caught.value)
    assert "Earlier checkpoints are untouched." in str(caught.value)
    assert str(caught.value).startswith("checkpoint ")  # all ranks say the same, so none is named
    home = tmp_path / ("elsewhere" if deed == "file in the way" else "checkpoints")
    assert steps_in(home) == [1, 2] and all(stored.is_whole(home / f"step-0000000{k}") for k in (1, 2))
    assert not list(home.glob(".*"))  # what was half written would keep a full disk full
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


def test_a_fault_of_our_own_in_rank_0_s_saving_ends_all_ranks_and_names_it(run_ranks, tmp_path) -> None:
    table = numbers_table(6, 6, checkpoint={"every_steps": 1})
    with pytest.raises(RanksFailed, match=r"rank 0 raised ZeroDivisionError.*checkpoint of step 3"):
        run_ranks(3, breaking, table, str(tmp_path), "bug", 3, limit_s=30.0)
    assert steps_in(tmp_path) == [1, 2]


def test_a_run_folder_in_which_checkpoints_is_a_file_is_an_error_before_the_first_step(run_ranks, tmp_path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="checkpoints cannot be written: File exists"):
        run_ranks(2, run_in, numbers_table(), str(tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own that holds little."""
    folder.mkdir(exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip(f"no right to mount a small disk: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_ends_two_ranks_by_its_name_and_more_room_continues(run_ranks, tmp_path) -> None:
    disk, table = tmp_path / "disk", numbers_table(4, 12, checkpoint={"every_steps": 1, "keep_last": 99})
    run_ranks(2, run_in, table, str(tmp_path / "whole"))
    with small_disk(disk, "88k"):
        with pytest.raises(CheckpointError, match="No space left on device"):
            run_ranks(2, run_in, table, str(disk / "run"))
        done = steps_in(disk / "run")
        assert 1 <= len(done) < 12 and done == list(range(1, len(done) + 1))
        assert all(
            stored.newest_good(disk / "run", hashes=True)[0].path == path
            for path in stored.candidates(disk / "run")[:1]
        )
        assert not list((disk / "run/checkpoints").glob(".*"))
        subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        told = run_ranks(2, run_in, table, str(disk / "run"), True)[0]
        assert f"resume: step {done[-1]} from" in told.out
        assert rows(disk / "run") == rows(tmp_path / "whole")
        assert summary_of(disk / "run") == summary_of(tmp_path / "whole")


def full_record(world: Any, table: dict[str, Any], folder: str) -> None:
    """From the second step on, the record's disk is full, as /dev/full is."""
    with contextlib.closing(begin_run(from_table(table), Path(folder), resume=False, world=world)) as run:
        stream = run.trainer.stream(0, run.end)
        run.step(stream)
        if world.rank == 0:
            run.recorder._metrics = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115 -- closed by the run
        for _ in range(1, run.end):
            run.step(stream)


def test_a_record_that_cannot_be_written_is_an_error_that_names_it(run_ranks, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"metrics.jsonl|No space left") as caught:
        run_ranks(2, full_record, numbers_table(4), str(tmp_path))
    assert "No space left on device" in str(caught.value) and caught.value.exit_code == 5


class FromFile:
    """As many samples as a file says: a data set that can change behind a recipe's back."""

    def __init__(self, length_in: str) -> None:
        self.length_in = length_in

    def __len__(self) -> int:
        return int(Path(self.length_in).read_text())

    def __getitem__(self, i: int) -> Any:
        import torch

        return torch.full((4,), i / 100)


def test_data_of_another_length_is_refused_on_resume(run_ranks, tmp_path) -> None:
    length, folder = tmp_path / "length", tmp_path / "run"
    length.write_text("24")
    build = {"build": "train.test_checkpoint_torn:FromFile", "length_in": str(length), "workers": 0}
    table = numbers_table(6, 6, data={}, train={"stop_after": 3})
    table["data"] = build
    run_ranks(2, run_in, table, str(folder))
    before, rest = tree_hash(folder), changed(table, train={"stop_after": 6})
    length.write_text("30")
    with pytest.raises(CheckpointError, match="the data has 30 samples, and had 24 when the checkpoint was written"):
        run_ranks(2, run_in, rest, str(folder), True)
    assert tree_hash(folder) == before
    length.write_text("24")
    run_ranks(2, run_in, rest, str(folder), True)
    assert len(rows(folder)) == 6
