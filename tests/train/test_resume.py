"""Stop and resume, on the same and on other numbers of processes: the same training as one that never stopped."""

from __future__ import annotations

import random
import shutil
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from train.runs import changed, copied, loaded_in, rows, run_in, small_table, steps_in, summary_of
from train.test_resume_position import numbers_table

WAYS = [(1, 1), (2, 2), (2, 1), (1, 2), (2, 3)]
STOP = 7  # one step before the first epoch ends
FP64_BOUND = 1e-11
"""Sums of 6 microbatches in another order differ by about 1e-16 of their size, and 5 steps let that grow."""


def table_of(optimizer: str) -> dict[str, Any]:
    """AdamW drops an epoch's last row, SGD with momentum keeps it: a step of one row, where most ranks have none."""
    last_batch = "drop" if optimizer == "adamw" else "keep"
    return small_table(optimizer, data={"last_batch": last_batch}, checkpoint={"every_steps": 5})


@pytest.fixture(scope="module")
def runs(run_ranks, tmp_path_factory):
    """`runs(optimizer, n, stop)`: the folder of a run on n ranks, made once; not to be changed."""
    home = tmp_path_factory.mktemp("runs")

    @cache
    def make(optimizer: str, n: int, stop: int | None) -> Path:
        folder = home / f"{optimizer}-{n}-{stop}"
        run_ranks(n, run_in, changed(table_of(optimizer), train={"stop_after": stop} if stop else {}), str(folder))
        return folder

    return make


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("before", "after"), WAYS)
def test_a_resumed_run_is_the_run_that_never_stopped(run_ranks, runs, optimizer, before, after) -> None:
    table, whole = table_of(optimizer), runs(optimizer, before, None)
    folder = copied(runs(optimizer, before, STOP), f"{optimizer}-{before}-to-{after}")
    assert steps_in(folder) == [5, STOP]
    assert summary_of(folder)["status"] == "stopped"

    told = run_ranks(after, run_in, table, str(folder), True)

    assert f"resume: step {STOP} from {folder}/checkpoints/step-0000000{STOP}" in told[0].out
    assert [t.out for t in told[1:]] == [""] * (after - 1)
    assert "exactness ends" not in told[0].out
    assert rows(folder, "samples.jsonl") == rows(whole, "samples.jsonl")
    if before == after:
        assert rows(folder) == rows(whole)
        assert summary_of(folder) == summary_of(whole)
        return
    assert_close(folder, whole)
    ours, theirs = summary_of(folder), summary_of(whole)
    assert ours["status"] == "done" and ours["world_size"] == after
    assert [ours[k] for k in ("step", "tokens", "samples")] == [theirs[k] for k in ("step", "tokens", "samples")]


def assert_close(folder: Path, whole: Path) -> None:
    """Rows up to the stop are equal bit by bit; those after it, and the last weights, up to rounding."""
    ours, theirs = rows(folder), rows(whole)
    assert ours[:STOP] == theirs[:STOP]
    for one, other in zip(ours, theirs, strict=True):
        assert {**one, "loss": 0, "grad_norm": 0} == {**other, "loss": 0, "grad_norm": 0}
        assert abs(one["loss"] - other["loss"]) <= FP64_BOUND * other["loss"]
        assert abs(one["grad_norm"] - other["grad_norm"]) <= FP64_BOUND * other["grad_norm"]
    a, b = (load_file(path / "checkpoints/step-00000012/model.safetensors") for path in (folder, whole))
    assert list(a) == list(b)
    top = max(float(t.abs().max()) for t in b.values())
    assert max(float((a[n] - b[n]).abs().max()) for n in b) <= FP64_BOUND * top


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 2)])
def test_every_rank_holds_the_saved_state_bit_by_bit(run_ranks, runs, optimizer, before, after) -> None:
    folder = copied(runs(optimizer, before, STOP), f"{optimizer}-{before}-in-{after}")
    saved = [
        load_file(folder / f"checkpoints/step-0000000{STOP}/{name}.safetensors") for name in ("model", "optimizer")
    ]
    for held in run_ranks(after, loaded_in, table_of(optimizer), str(folder)):
        for ours, theirs in zip(held, saved, strict=True):
            assert sorted(ours) == sorted(theirs) and ours
            assert all(torch.equal(ours[n], theirs[n]) and ours[n].dtype == theirs[n].dtype for n in theirs)


def test_a_chain_of_stops_on_changing_layouts_has_every_step_once(run_ranks, runs, tmp_path) -> None:
    """B049, B050: steps are the one unit; nothing is multiplied by the accumulation or by the ranks."""
    table, whole, folder = table_of("adamw"), runs("adamw", 1, None), tmp_path / "chain"
    for n, stop in ((2, 3), (3, 4), (1, 9), (2, 12)):
        told = run_ranks(n, run_in, changed(table, train={"stop_after": stop}), str(folder), True)
        assert f"step {stop}/{stop}" in told[0].out
    assert [row["step"] for row in rows(folder)] == list(range(1, 13))
    assert rows(folder, "samples.jsonl") == rows(whole, "samples.jsonl")
    assert [row["lr"] for row in rows(folder)] == [row["lr"] for row in rows(whole)]
    epochs = [row["epoch"] for row in rows(folder, "samples.jsonl")]
    assert epochs == [0] * 8 + [1] * 4


def test_an_older_checkpoint_continues_and_what_came_after_it_is_cut_off(run_ranks, runs) -> None:
    whole = runs("adamw", 2, None)
    folder = copied(whole, "adamw-rewound")
    for step in (10, 12):
        shutil.rmtree(folder / f"checkpoints/step-{step:08d}")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 13, "lo')  # killed while it wrote
    with (folder / "samples.jsonl").open("ab") as file:
        file.write(b"\0\0\xff\xfe\n")  # what a power cut may leave
    run_ranks(2, run_in, table_of("adamw"), str(folder), True)
    assert rows(folder) == rows(whole)
    assert rows(folder, "samples.jsonl") == rows(whole, "samples.jsonl")
    assert summary_of(folder) == summary_of(whole)


def test_a_finished_run_has_nothing_left_to_do_and_stays_as_it_was(run_ranks, runs) -> None:
    folder = copied(runs("sgd", 1, None), "sgd-finished")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for n in (1, 2):
        told = run_ranks(n, run_in, table_of("sgd"), str(folder), True)
        assert f"nothing to do: step 12 of 12 is done, in {folder}" in told[0].out
        assert told[0].summary == told[-1].summary and told[0].summary["loss"] > 0
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_run_killed_between_its_last_checkpoint_and_its_summary_gets_the_summary(run_ranks, runs) -> None:
    whole = runs("sgd", 1, None)
    folder = copied(whole, "sgd-no-summary")
    (folder / "summary.json").unlink()
    run_ranks(1, run_in, table_of("sgd"), str(folder), True)
    assert summary_of(folder) == summary_of(whole)
    assert rows(folder) == rows(whole)


def test_a_stop_before_what_is_done_changes_nothing(run_ranks, runs) -> None:
    folder = copied(runs("sgd", 2, STOP), "sgd-stop-earlier")
    before = summary_of(folder)
    told = run_ranks(2, run_in, changed(table_of("sgd"), train={"stop_after": 3}), str(folder), True)
    assert f"nothing to do: step {STOP} of 12 is done" in told[0].out
    assert summary_of(folder) == before and len(rows(folder)) == STOP


def test_knobs_that_change_on_resume_change_no_number(run_ranks, runs) -> None:
    """Recompute gives the same bits; reducing at each microbatch sums in another order."""
    whole = runs("adamw", 2, None)
    table = changed(table_of("adamw"), checkpoint={"every_steps": 1, "keep_last": 1}, record={"tensorboard": True})
    folder = copied(runs("adamw", 2, STOP), "adamw-recompute")
    run_ranks(2, run_in, changed(table, train={"recompute": "full"}), str(folder), True)
    assert rows(folder) == rows(whole) and summary_of(folder) == summary_of(whole)
    assert steps_in(folder) == [12] and (folder / "tensorboard").is_dir()
    folder = copied(runs("adamw", 2, STOP), "adamw-sync")
    run_ranks(2, run_in, changed(table, train={"sync": "every"}), str(folder), True)
    assert_close(folder, whole)


def test_the_recipe_in_the_run_folder_resumes_its_run(run_ranks, runs) -> None:
    folder = copied(runs("adamw", 2, STOP), "adamw-own-recipe")
    table = tomllib.loads((folder / "recipe.toml").read_text())
    assert table["train"].pop("stop_after") == STOP
    run_ranks(2, run_in, table, str(folder), True)
    assert summary_of(folder) == summary_of(runs("adamw", 2, None))


class Noisy:
    """Rows that draw from all three global generators, as augmentation does."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> torch.Tensor:
        drawn = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        return torch.tensor([float(i), *drawn])


@pytest.mark.parametrize("workers", [0, 1])
def test_random_augmentation_continues_as_it_would_have_been(run_ranks, tmp_path, workers) -> None:
    """Draws depend on (seed, epoch, sample), so neither a resume nor another number of ranks is seen in them."""
    table = numbers_table(6, 8)
    table["data"] = {"build": "train.test_resume:Noisy", "workers": workers}
    table["optimizer"] = {"name": "sgd", "lr": 1e-4}
    run_ranks(2, run_in, table, str(tmp_path / "whole"))
    run_ranks(2, run_in, changed(table, train={"stop_after": 6}), str(tmp_path / "cut"))
    copied(tmp_path / "cut", "other")
    run_ranks(2, run_in, table, str(tmp_path / "cut"), True)
    assert summary_of(tmp_path / "cut") == summary_of(tmp_path / "whole")
    run_ranks(1, run_in, table, str(tmp_path / "other"), True)
    # fp32 sums of 6 samples in another order: 6e-8 each; other draws would show in the first digits.
    ours, theirs = ([row["loss"] for row in rows(tmp_path / name)] for name in ("other", "whole"))
    assert ours == pytest.approx(theirs, rel=1e-5)
