"""What a run leaves behind: metrics line by line, samples, TensorBoard events, the resolved recipe, the summary."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright.spec.batch import lr_factor
from meshwright.spec.load import from_table, load
from meshwright.spec.schedule import lr_multiplier
from meshwright.train.record import Console, Recorder
from meshwright.train.run import begin_run
from train.parity import RaggedRows
from train.runs import changed, rows, run_in, small_table, steps_in, summary_of
from train.test_resume_position import numbers_table

KEYS = ["step", "loss", "lr", "grad_norm", "tokens", "samples", "step_time_s", "tokens_per_s"]


def labels_of(sample: int) -> int:
    return int((RaggedRows()[sample]["labels"] != -100).sum())


@pytest.mark.parametrize("last_batch", ["drop", "keep"])
@pytest.mark.parametrize("n", [1, 3])
def test_each_step_has_one_object_with_the_keys_of_the_design(run_ranks, tmp_path, last_batch, n) -> None:
    """Tokens are label tokens and samples are samples, of ragged rows and of an epoch's short last step too."""
    table = small_table("sgd", "fp32", steps=12, data={"last_batch": last_batch})
    run_ranks(n, run_in, table, str(tmp_path))
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line) for line in text.splitlines()]
    assert text.endswith("\n") and [row["step"] for row in found] == list(range(1, 13))
    used = [row["samples"] for row in rows(tmp_path, "samples.jsonl")]
    assert [len(ids) for ids in used] == ([12] * 12 if last_batch == "drop" else [12] * 8 + [1] + [12] * 3)
    samples = tokens = 0
    recipe = from_table(table)
    for row, ids in zip(found, used, strict=True):
        samples, tokens = samples + len(ids), tokens + sum(map(labels_of, ids))
        assert list(row) == KEYS
        assert (row["samples"], row["tokens"]) == (samples, tokens)
        assert row["lr"] == 0.1 * lr_multiplier(recipe.schedule, 12, row["step"] - 1)
        assert row["step_time_s"] > 0 and math.isfinite(row["loss"]) and row["grad_norm"] > 0
    assert lr_factor(recipe.optimizer, recipe.batch).factor == 1.0
    assert (summary_of(tmp_path)["tokens"], summary_of(tmp_path)["samples"]) == (tokens, samples)


def sizes(world: Any, table: dict[str, Any], folder: str) -> list[int]:
    """How many whole lines the record has after each step, as another process would see it."""
    seen = []
    with contextlib.closing(begin_run(from_table(table), Path(folder), resume=False, world=world)) as run:
        stream = run.trainer.stream(0, run.end)
        for _ in range(run.end):
            run.step(stream)
            run.agreement.meet()
            seen += [Path(folder, name).read_bytes().count(b"\n") for name in ("metrics.jsonl", "samples.jsonl")]
    return seen


def test_every_line_is_on_disk_when_its_step_is_done(run_ranks, tmp_path) -> None:
    expected = [count for step in range(1, 5) for count in (step, step)]
    assert run_ranks(2, sizes, numbers_table(4, 4), str(tmp_path)) == [expected, expected]


def of_its_rank(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """1 a sample on rank 0, 3 on rank 1, whatever the model says."""
    rank = torch.distributed.get_rank()
    return model(batch).sum() * 0.0 + (1.0 + 2.0 * rank) * len(batch), len(batch)


def test_the_recorded_loss_is_the_mean_over_all_ranks(run_ranks, tmp_path) -> None:
    """B128: rank losses 1 and 3, the log says 2; and weighted where ranks have unequal shares."""
    table = numbers_table(4, 2, loss={"build": "train.test_record:of_its_rank"})
    told = run_ranks(2, run_in, table, str(tmp_path / "even"))
    assert [row["loss"] for row in rows(tmp_path / "even")] == [2.0, 2.0]
    assert "loss 2.0000" in told[0].out and told[0].summary["loss"] == told[1].summary["loss"] == 2.0
    kept = numbers_table(
        8, 3, loss={"build": "train.test_record:of_its_rank"}, data={"last_batch": "keep"}, batch={"microbatch_size": 1}
    )
    kept["data"]["count"] = 19  # the third step has 3 samples: 2 on rank 0, 1 on rank 1
    run_ranks(2, run_in, kept, str(tmp_path / "uneven"))
    assert rows(tmp_path / "uneven")[2]["loss"] == pytest.approx((2 * 1.0 + 1 * 3.0) / 3, rel=1e-12)  # fp64 sums


def test_validation_stands_in_the_row_of_its_step_and_is_printed_once(run_ranks, tmp_path) -> None:
    """B130: one step axis for all metrics, on any number of ranks."""
    table = numbers_table(4, 7, validation={"fraction": 0.25, "every_steps": 3})
    told = run_ranks(2, run_in, table, str(tmp_path))
    with_loss = [row["step"] for row in rows(tmp_path) if "validation_loss" in row]
    assert with_loss == [3, 6, 7]
    assert [row.get("validation_samples") for row in rows(tmp_path)] == [None, None, 5, None, None, 5, 5]
    for step in with_loss:
        assert told[0].out.count(f"validation at step {step}: loss ") == 1
    assert told[1].out == ""
    last, summary = rows(tmp_path)[-1], summary_of(tmp_path)
    assert (summary["validation_loss"], summary["validation_samples"]) == (last["validation_loss"], 5)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run folder."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_the_same_numbers_at_the_same_steps_also_after_a_resume(run_ranks, tmp_path) -> None:
    """B130. What the killed run wrote past its checkpoint is not shown twice."""
    table = numbers_table(4, 6, record={"tensorboard": True}, validation={"fraction": 0.25, "every_steps": 2})
    table = changed(table, checkpoint={"every_steps": 2})
    run_ranks(2, run_in, changed(table, train={"stop_after": 5}), str(tmp_path))
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == [1, 2, 3, 4, 5]
    (tmp_path / "checkpoints/step-00000005").rename(tmp_path / "gone")
    run_ranks(2, run_in, table, str(tmp_path), True)
    shown, recorded = scalars(tmp_path), rows(tmp_path)
    for name in ("loss", "lr", "grad_norm", "tokens", "samples"):
        assert [step for step, _ in shown[f"train/{name}"]] == [1, 2, 3, 4, 5, 6]
        # TensorBoard keeps single precision, 6e-8 of a number's size.
        assert [v for _, v in shown[f"train/{name}"]] == pytest.approx([row[name] for row in recorded], rel=1e-7)
    held = [(row["step"], row["validation_loss"]) for row in recorded if "validation_loss" in row]
    assert [step for step, _ in held] == [2, 4, 6] == [step for step, _ in shown["train/validation_loss"]]


def test_without_being_asked_there_are_no_event_files(run_ranks, tmp_path) -> None:
    run_ranks(1, run_in, numbers_table(4, 1), str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoints", "memory.json", "metrics.jsonl", "recipe.toml", "samples.jsonl", "summary.json",
    ]  # fmt: skip


def test_the_recipe_in_the_folder_is_resolved_and_starts_the_same_run(run_ranks, tmp_path) -> None:
    table = numbers_table(12, 3, schedule={"name": "cosine", "warmup_steps": 1}, data={"count": 40})
    run_ranks(2, run_in, table, str(tmp_path / "one"))
    resolved = load(tmp_path / "one/recipe.toml")
    assert (resolved.layout.dp_replicate, resolved.layout.zero_stage, resolved.batch.microbatch_size) == (2, 0, 6)
    manifest = json.loads((tmp_path / "one/checkpoints/step-00000003/manifest.json").read_text())
    assert from_table(manifest["recipe"]) == resolved
    (tmp_path / "one").rename(tmp_path / "first")
    again = {name: dict(values) for name, values in manifest["recipe"].items()}
    run_ranks(2, run_in, again, str(tmp_path / "one"))
    assert rows(tmp_path / "one") == rows(tmp_path / "first")
    assert summary_of(tmp_path / "one") == summary_of(tmp_path / "first")


def poisoned(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Not finite where sample 0 is in the batch."""
    total = ((model(batch) - batch) ** 2).sum()
    return (total * float("inf") if bool((batch == 0).any()) else total), len(batch)


def test_a_skipped_step_is_recorded_as_json_that_any_parser_reads(run_ranks, tmp_path) -> None:
    """NaN and Infinity, which Python's json writes if it is let, are no JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    table = numbers_table(4, 5, loss={"build": "train.test_record:poisoned"}, train={"on_nonfinite": "skip"})
    table["train"] |= {"steps": 6, "record_samples": True}
    run_ranks(2, run_in, table, str(tmp_path))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [row["step"] for row in found if "skipped" in row] == [1, 6]
    assert found[0]["loss"] is None and "rank 0" in found[0]["skipped"]
    assert all(isinstance(row["loss"], float) for row in found[1:5])
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert summary["loss"] is None and summary["step"] == 6
    assert steps_in(tmp_path) == [6]
    run_ranks(2, run_in, table, str(tmp_path), True)  # and it reads it again


def test_other_ranks_write_nothing_and_a_run_without_a_folder_neither(tmp_path) -> None:
    for folder, speaks in ((tmp_path, False), (None, True)):
        recorder = Recorder(folder, speaks=speaks, tensorboard=True, start=0)
        recorder.step({"step": 1})
        recorder.samples(1, 0, [1])
        recorder.summary({"step": 1})
        recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_each_line_is_one_write_so_that_lines_of_several_ranks_do_not_mix(monkeypatch) -> None:
    """torchrun starts ranks with `python -u`: what print writes apart arrives apart."""
    said, warned = Writes(), Writes()
    monkeypatch.setattr("sys.stdout", said)
    monkeypatch.setattr("sys.stderr", warned)
    console = Console(speaks=True, progress=True, total=2, start=0)
    console.say("a line")
    console.warn("of caution")
    for step in (1, 2):
        console.step({"step": step, "loss": 1.0, "tokens_per_s": 1.0, "lr": 0.1})
    assert said.texts[0] == "a line\n" and warned.texts == ["warning: of caution\n"]
    assert len(said.texts) == 3 and all(text.count("\n") == 1 and text.endswith("\n") for text in said.texts)


class Writes(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def write(self, text: str) -> int:
        self.texts.append(text)
        return len(text)


def test_lines_where_there_is_no_terminal_say_step_loss_speed_rate_and_time_left(run_ranks, tmp_path) -> None:
    told = run_ranks(2, run_in, numbers_table(4, 4), str(tmp_path))
    lines = told[0].out.splitlines()
    assert told[0].err == told[1].err == told[1].out == ""
    first, last = lines[-3:-1]
    for line, step in ((first, 1), (last, 4)):
        assert line.startswith(f"step {step}/4  loss ") and " tokens/s  lr 1.00e-01  ETA 0:0" in line
    assert lines[-1].startswith("done: step 4 of 4, loss ") and lines[-1].endswith(f"in {tmp_path}")
