"""Where a resumed run goes on: the next sample, the next window of microbatches, the next line of each record."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from safetensors.torch import load_file

import meshwright
from meshwright.errors import CheckpointError, SpecError
from meshwright.spec.load import from_table
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.train.run import begin_run
from meshwright.train.trainer import Parts
from train.runs import changed, rows, run_in, steps_in, summary_of


class Numbers:
    """Samples 0.0, 1.0, ... with themselves as targets."""

    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((4,), float(i) / self.count)


def matrix() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))


def squared_error(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return ((model(batch) - batch) ** 2).sum(), len(batch)


def numbers_table(global_batch_size: int = 2, steps: int = 10, **changes: Any) -> dict[str, Any]:
    here = "train.test_resume_position"
    table: dict[str, Any] = {
        "model": {"build": f"{here}:matrix"},
        "data": {"build": f"{here}:Numbers", "shuffle": False, "workers": 0},
        "loss": {"build": f"{here}:squared_error"},
        "batch": {"global_batch_size": global_batch_size},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "train": {"steps": steps, "record_samples": True},
    }
    return changed(table, **changes)


class Crash(Exception):
    """What ends a run in the middle of a step."""


def run_until_microbatch(world: Any, table: dict[str, Any], folder: str, step: int, count: int) -> str:
    """Crash in a step (from 1) after so many of its microbatches."""
    with contextlib.closing(begin_run(from_table(table), Path(folder), resume=False, world=world)) as run:
        stepper, done = run.trainer.stepper, 0
        forward = stepper.forward

        def counted(microbatch: Any, *, reduce: bool) -> Any:
            nonlocal done
            if microbatch.step + 1 == step:
                done += 1
                if done > count:
                    raise Crash
            return forward(microbatch, reduce=reduce)

        stepper.forward = counted  # type: ignore[method-assign]
        stream = run.trainer.stream(0, run.end)
        try:
            for _ in range(run.end):
                run.step(stream)
        except Crash:
            return "crashed"
    return "never came there"


def windows(world: Any, table: dict[str, Any], folder: str) -> list[int]:
    """Resume, and count the microbatches of each step."""
    counts: list[int] = []
    with contextlib.closing(begin_run(from_table(table), Path(folder), resume=True, world=world)) as run:
        stepper = run.trainer.stepper
        forward = stepper.forward

        def counted(microbatch: Any, *, reduce: bool) -> Any:
            counts[-1] += 1
            return forward(microbatch, reduce=reduce)

        stepper.forward = counted  # type: ignore[method-assign]
        stream = run.trainer.stream(run.start.step, run.end)
        for _ in range(run.start.step, run.end):
            counts.append(0)
            run.step(stream)
        run.finish()
    return counts


def test_after_five_steps_of_two_samples_the_next_sample_is_ten(run_ranks, tmp_path) -> None:
    """B043"""
    table = numbers_table(checkpoint={"every_steps": 5})
    assert run_ranks(1, run_until_microbatch, table, str(tmp_path), 7, 0) == ["crashed"]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    run_ranks(1, run_in, table, str(tmp_path), True)
    assert [row["samples"] for row in rows(tmp_path, "samples.jsonl")] == [[2 * k, 2 * k + 1] for k in range(10)]
    assert [row["samples"] for row in rows(tmp_path)] == [2 * k for k in range(1, 11)]


def test_a_crash_inside_a_window_replays_it_from_its_first_microbatch(run_ranks, tmp_path) -> None:
    """B051: accumulation 4, a crash after microbatch 2 of step 5; no gradient of a half window survives."""
    table = numbers_table(8, 6, batch={"microbatch_size": 2}, checkpoint={"every_steps": 4})
    (whole,) = run_ranks(1, run_in, table, str(tmp_path / "whole"))
    assert run_ranks(1, run_until_microbatch, table, str(tmp_path / "cut"), 5, 2) == ["crashed"]
    assert steps_in(tmp_path / "cut") == [4]
    (told,) = run_ranks(1, run_in, table, str(tmp_path / "cut"), True)
    assert told.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")


@pytest.mark.parametrize(("before", "after", "window"), [(3, 4, 3), (4, 3, 4), (3, 12, 1)])
def test_another_microbatch_moves_no_border_of_a_step_and_is_said(run_ranks, tmp_path, before, after, window) -> None:
    """B055: saved with windows of 12 / before microbatches, resumed with windows of 12 / after."""
    table = numbers_table(12, 5, batch={"microbatch_size": before}, precision={"compute": "fp64"}, data={"count": 40})
    run_ranks(1, run_in, table, str(tmp_path / "whole"))
    run_ranks(1, run_in, changed(table, train={"stop_after": 2}), str(tmp_path / "cut"))
    other = changed(table, batch={"microbatch_size": after})
    assert run_ranks(1, windows, other, str(tmp_path / "cut")) == [[window] * 3]
    assert rows(tmp_path / "cut", "samples.jsonl") == rows(tmp_path / "whole", "samples.jsonl")
    ours, theirs = rows(tmp_path / "cut"), rows(tmp_path / "whole")
    assert ours[:2] == theirs[:2]
    # No dropout here, and fp64: other windows round differently by about 1e-16 a sum, far below 1e-12.
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-12)


def test_the_line_about_another_microbatch_names_both_and_says_that_exactness_ends(run_ranks, tmp_path) -> None:
    table = numbers_table(12, 4, batch={"microbatch_size": 3}, data={"count": 40}, train={"stop_after": 2})
    run_ranks(1, run_in, table, str(tmp_path))
    same = changed(table, train={"stop_after": 3})
    assert "exactness" not in run_ranks(1, run_in, same, str(tmp_path), True)[0].out
    other = changed(table, batch={"microbatch_size": 4}, train={"stop_after": 4})
    line = "resume: batch.microbatch_size was 3, now 4: dropout and rounding differ from here on, so exactness ends"
    assert line in run_ranks(1, run_in, other, str(tmp_path), True)[0].out


def test_a_microbatch_that_was_left_out_stays_where_it_can_and_its_change_is_said_where_not(
    run_ranks, tmp_path
) -> None:
    table = numbers_table(12, 4, data={"count": 40}, train={"stop_after": 2})
    (told,) = run_ranks(1, run_in, table, str(tmp_path))
    assert "2 microbatches x 6 samples" in told.out  # 6 is the largest divisor of 12 up to 8
    told = run_ranks(2, run_in, changed(table, train={"stop_after": 3}), str(tmp_path), True)[0]
    assert "1 microbatch x 6 samples" in told.out and "exactness" not in told.out
    told = run_ranks(3, run_in, changed(table, train={"stop_after": 4}), str(tmp_path), True)[0]
    assert "1 microbatch x 4 samples" in told.out
    assert "resume: batch.microbatch_size was 6, now 4" in told.out


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [10]), (2, [8, 10]), (3, [6, 8, 10]), (9, [2, 4, 6, 8, 10])])
def test_keep_last_keeps_the_newest(run_ranks, tmp_path, keep_last, kept) -> None:
    table = numbers_table(checkpoint={"every_steps": 2, "keep_last": keep_last})
    run_ranks(1, run_in, table, str(tmp_path))
    assert steps_in(tmp_path) == kept
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_keep_last_counts_checkpoints_from_before_the_resume(run_ranks, tmp_path) -> None:
    table = numbers_table(checkpoint={"every_steps": 2, "keep_last": 9}, train={"stop_after": 5})
    run_ranks(1, run_in, table, str(tmp_path))
    assert steps_in(tmp_path) == [2, 4, 5]
    more = changed(table, train={"stop_after": 6}, checkpoint={"every_steps": 2, "keep_last": 2})
    run_ranks(1, run_in, more, str(tmp_path), True)
    assert steps_in(tmp_path) == [5, 6]


def test_without_every_steps_only_the_last_step_is_saved(run_ranks, tmp_path) -> None:
    run_ranks(1, run_in, numbers_table(steps=3), str(tmp_path))
    assert steps_in(tmp_path) == [3]


def test_resuming_where_nothing_is_starts_at_step_0(run_ranks, tmp_path) -> None:
    table = numbers_table(steps=3)
    told = run_ranks(1, run_in, table, str(tmp_path / "new"), True)[0]
    assert "resume: no checkpoint yet, starting at step 0" in told.out
    run_ranks(1, run_in, table, str(tmp_path / "other"))
    assert rows(tmp_path / "new") == rows(tmp_path / "other")


def test_a_run_killed_before_its_first_checkpoint_starts_again_with_an_empty_record(run_ranks, tmp_path) -> None:
    table = numbers_table(checkpoint={"every_steps": 5})
    assert run_ranks(1, run_until_microbatch, table, str(tmp_path), 4, 0) == ["crashed"]
    assert len(rows(tmp_path)) == 3
    run_ranks(1, run_in, table, str(tmp_path), True)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 11))


@pytest.mark.parametrize("record", [True, False])
def test_recording_samples_may_be_turned_on_or_off(run_ranks, tmp_path, record) -> None:
    first = numbers_table(train={"record_samples": not record, "stop_after": 4, "steps": 10})
    run_ranks(1, run_in, first, str(tmp_path))
    run_ranks(1, run_in, numbers_table(train={"record_samples": record, "steps": 10}), str(tmp_path), True)
    assert [row["step"] for row in rows(tmp_path, "samples.jsonl")] == (list(range(5, 11)) if record else [1, 2, 3, 4])


EVERY = [name for name in OPTIMIZERS if name != "muon"]  # takes matrices alone


@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_continues_bit_by_bit(run_ranks, tmp_path, name) -> None:
    table = numbers_table(4, 6, optimizer={"name": name, "lr": 0.01, "momentum": 0.9})
    if "momentum" not in OPTIMIZERS[name].options:
        del table["optimizer"]["momentum"]
    (whole,) = run_ranks(1, run_in, table, str(tmp_path / "whole"))
    run_ranks(1, run_in, changed(table, train={"stop_after": 3}), str(tmp_path / "cut"))
    (told,) = run_ranks(1, run_in, table, str(tmp_path / "cut"), True)
    assert told.summary["weights_sha256"] == whole.summary["weights_sha256"]
    last = "checkpoints/step-00000006/optimizer.safetensors"
    ours, theirs = load_file(tmp_path / "cut" / last), load_file(tmp_path / "whole" / last)
    assert sorted(ours) == sorted(theirs)
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in theirs)


def loud(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """So large that fp16 gradients overflow until the loss scale has come down."""
    return ((model(batch) - batch).float() ** 2).sum() * 200, len(batch)


def test_the_loss_scale_of_fp16_continues(run_ranks, tmp_path) -> None:
    table = numbers_table(4, 8, precision={"compute": "fp16"}, loss={"build": "train.test_resume_position:loud"})
    table["optimizer"] = {"name": "sgd", "lr": 1e-4}
    (whole,) = run_ranks(1, run_in, table, str(tmp_path / "whole"))
    skipped = [row["step"] for row in rows(tmp_path / "whole") if "skipped" in row]
    assert 1 in skipped and 8 not in skipped, "else this run shows nothing"
    run_ranks(1, run_in, changed(table, train={"stop_after": 6}), str(tmp_path / "cut"))
    (told,) = run_ranks(1, run_in, table, str(tmp_path / "cut"), True)
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert told.summary["weights_sha256"] == whole.summary["weights_sha256"]


class OneTrains(nn.Module):
    """Two layers, of which the first may be frozen."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.a.requires_grad_(not frozen)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(batch))
        return out


def resume_frozen(world: Any, table: dict[str, Any], folder: str) -> None:
    """The recipe says the same, and the Python object is another."""
    parts = Parts(model=OneTrains(frozen=True))
    begin_run(from_table(table), Path(folder), resume=True, world=world, parts=parts, progress=False).close()


def test_the_state_of_a_parameter_that_is_frozen_now_is_not_dropped_in_silence(run_ranks, tmp_path) -> None:
    """B073: train a and b, freeze a: that is another training, in the recipe or in Python."""
    here = "train.test_resume_position:OneTrains"
    table = numbers_table(4, 6, model={"build": here, "frozen": False})
    frozen = numbers_table(4, 6, model={"build": here, "frozen": True})
    run_ranks(1, run_in, changed(table, train={"stop_after": 3}), str(tmp_path))
    with pytest.raises(SpecError, match=r"model.arguments was .*false.*, now .*true"):
        run_ranks(1, run_in, frozen, str(tmp_path), True)
    with pytest.raises(CheckpointError, match=r"state of parameters that are not trained now: a.bias, a.weight\."):
        run_ranks(1, resume_frozen, table, str(tmp_path))
    (told,) = run_ranks(1, run_in, table, str(tmp_path), True)
    assert "momentum_buffer/a.weight" in load_file(tmp_path / told.summary["checkpoint"] / "optimizer.safetensors")


def owned(world: Any, folder: str, stop: int, total: int, resume: bool, **sections: Any) -> tuple[int, dict[str, Any]]:
    """The Python API on a rank: the user's own loop, left after `stop` steps."""
    run = meshwright.setup(
        model=matrix, data=Numbers(), loss=squared_error, optimizer={"name": "sgd", "momentum": 0.9}, lr=0.1,
        global_batch_size=4, loading={"workers": 0}, checkpoint={"every_steps": 2}, run_dir=folder, resume=resume,
        progress=True, **sections,
    )  # fmt: skip
    begun = run.done
    for step in run.steps(total):
        step.train()
        if step.number == stop:
            return begun, {}
    return begun, run.summary


def call_owned(world: Any, options: dict[str, Any]) -> tuple[int, dict[str, Any], str]:
    out, joined = io.StringIO(), contextlib.nullcontext(world)  # the pool's ranks have joined already
    with contextlib.redirect_stdout(out), mock.patch("meshwright.api.join_world", return_value=joined):
        begun, summary = owned(world, **options)
    return begun, summary, out.getvalue()


def test_a_loop_of_the_users_own_resumes(run_ranks, tmp_path) -> None:
    """run.steps(n) says how long a training is after setup(): resuming must not take that for another training."""
    schedule = {"schedule": {"name": "cosine", "warmup_steps": 3}}
    whole = dict(folder=str(tmp_path / "whole"), stop=99, total=8, resume=False, **schedule)
    (_, summary, out), _ = run_ranks(2, call_owned, whole)
    assert "step 1/8" in out and "step 8/8" in out
    cut = dict(whole, folder=str(tmp_path / "cut"))
    run_ranks(2, call_owned, cut | {"stop": 5})
    ranks = run_ranks(2, call_owned, cut | {"resume": True})
    assert [begun for begun, _, _ in ranks] == [4, 4]
    assert ranks[0][1]["weights_sha256"] == ranks[1][1]["weights_sha256"] == summary["weights_sha256"]
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert "steps = 8\n" in (tmp_path / "cut/recipe.toml").read_text()


def test_a_loop_of_another_length_is_refused_on_resume(run_ranks, tmp_path) -> None:
    options = dict(folder=str(tmp_path), stop=4, total=8, resume=False)
    run_ranks(1, call_owned, options)
    with pytest.raises(SpecError, match=r"run.steps\(9\): resumes a training of 8 steps.*Nearest: run.steps\(8\)"):
        run_ranks(1, call_owned, options | {"resume": True, "total": 9})
    with pytest.raises(SpecError, match="holds a run already"):
        run_ranks(1, call_owned, options)


def test_a_loop_too_short_for_its_schedule_is_refused(run_ranks, tmp_path) -> None:
    options = dict(folder=str(tmp_path), stop=4, total=2, resume=False, schedule={"name": "cosine", "warmup_steps": 3})
    with pytest.raises(SpecError, match=r"run.steps\(2\): 1 fault\n  schedule.warmup_steps: is 3, more than"):
        run_ranks(1, call_owned, options)


def test_the_summary_of_a_run_has_a_line_for_each_fact(run_ranks, tmp_path) -> None:
    (told,) = run_ranks(1, run_in, numbers_table(steps=3), str(tmp_path))
    summary = summary_of(tmp_path)
    assert summary == {k: v for k, v in told.summary.items() if k != "seconds"}
    assert summary | {"loss": 0, "weights_sha256": ""} == {
        "status": "done", "step": 3, "steps": 3, "loss": 0, "layout": "single", "world_size": 1, "tokens": 6,
        "samples": 6, "weights_sha256": "", "checkpoint": "checkpoints/step-00000003",
    }  # fmt: skip
    assert summary["loss"] == rows(tmp_path)[-1]["loss"]
