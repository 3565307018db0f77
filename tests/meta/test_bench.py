import importlib
import json
import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from cli.warm import script

BENCH = Path(__file__).parents[2] / "bench"
RECIPE = """
[model]
name = "llama"
n_layers = 1
d_model = 16
n_heads = 2
n_kv_heads = 1
d_ff = 32
vocab_size = 256
[data]
seq_len = 16
[batch]
global_batch_size = 4
microbatch_size = 1
[optimizer]
lr = 1e-3
weight_decay = 0.1
max_grad_norm = 1.0
[schedule]
name = "cosine"
warmup_steps = 2
[train]
steps = 60
"""


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCH / script), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_warm(meshwright, name: str, *words: str) -> None:
    """The same, without the start of its interpreter and without what it prints."""
    done = meshwright(cwd=BENCH, before=script(BENCH / name, *words), limit_s=120.0)
    assert done.code == 0, done.err


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return str(path)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["ddp2", "zero3x2"])
def test_both_sides_are_the_same_training_and_every_ratio_is_a_number(recipe, layout):
    tiny = ["--rounds", "1", "--steps", "60", "--skip", "5", "--no-warm-up", "--json"]
    found = json.loads(run("compare.py", "--recipe", recipe, "--layout", layout, *tiny))["layouts"][layout]
    assert found["losses_equal"] and found["largest_loss_difference"] <= 1e-4
    ratios = found["ratios"]["hand"]
    assert {"cpu_us", "tokens_per_s", "first_step_s", "peak_max_mib", "peak_sum_mib"} <= set(ratios)
    for name, values in ratios.items():
        assert len(values) == 1 and math.isfinite(values[0]) and values[0] > 0, name


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_the_hand_written_loop_is_the_same_training_under_tp_and_pp(tmp_path, layout):
    last, path = {}, tmp_path / "two.toml"
    path.write_text(RECIPE.replace("n_kv_heads = 1", "n_kv_heads = 2").replace("n_layers = 1", "n_layers = 2"))
    for word in ("ddp2", layout):
        run("hand_loop.py", str(path), str(tmp_path / word), "--layout", word, "--steps", "8", "--fork")
        last[word] = json.loads((tmp_path / word / "metrics.jsonl").read_text().splitlines()[-1])
    # The fp32 sums of 4 microbatches, in other orders.
    assert last[layout]["loss"] == pytest.approx(last["ddp2"]["loss"], rel=1e-5)
    assert last[layout]["grad_norm"] == pytest.approx(last["ddp2"]["grad_norm"], rel=1e-4)


@pytest.mark.matrix
def test_the_idle_share_of_each_schedule_is_measured():
    """The order of the schedules is right, and none waits less than its formula says.

    Measured is above the formula by what a message and Python take of a pass of 80 ms, some ms; below it only by the
    clock's reading, far under 0.01. What other programs do on the machine only adds.
    """
    arguments = ["--pp", "4", "--steps", "2", "--json"]
    rows = {row["schedule"]: row for row in json.loads(run("idle.py", *arguments))}
    for row in rows.values():
        assert row["measured"] > row["expected"] - 0.01, row
    assert rows["zbv"]["measured"] < rows["interleaved1f1b"]["measured"] < rows["1f1b"]["measured"]


def test_the_hand_written_loop_is_the_same_training_in_each_layout(meshwright, recipe, tmp_path):
    last = {}
    for layout in ("zero2x2", "hsdp2x2z1"):
        words = (recipe, str(tmp_path / layout), "--layout", layout, "--steps", "8", "--fork")
        run_warm(meshwright, "hand_loop.py", *words)
        last[layout] = json.loads((tmp_path / layout / "metrics.jsonl").read_text().splitlines()[-1])
    for layout, row in last.items():
        # The fp32 sums of 4 microbatches, in other orders.
        assert row["loss"] == pytest.approx(last["zero2x2"]["loss"], rel=1e-5), layout
        assert row["grad_norm"] == pytest.approx(last["zero2x2"]["grad_norm"], rel=1e-4), layout


def test_the_bytes_counted_are_those_of_the_textbook(meshwright, recipe, tmp_path):
    run_warm(meshwright, "count_bytes.py", recipe, str(tmp_path / "out"), "--layouts", "ddp2,zero3x2")
    found = json.loads((tmp_path / "out" / "bytes.json").read_text())
    root, block = 2 * 256 * 16 + 16, 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16
    microbatches, share = 2, 0.5  # of each rank; (n - 1) / n
    for mode, width in (("fast", 4), ("exact", 8)):
        # Besides the gradients a step sums its losses and agrees on a grid: some hundred bytes.
        assert found["ddp2"][mode]["allreduce_"] == pytest.approx(2 * share * (root + block) * width, abs=1000)
        cut = found["zero3x2"][mode]
        assert cut["_reduce_scatter_base_"] == share * microbatches * (root + block) * width
        # A block is gathered for forward and again for backward, the root once for both; weights stay fp32.
        assert cut["_allgather_base_"] == share * microbatches * (root + 2 * block) * 4


@pytest.mark.matrix
def test_the_cost_of_exact_mode_is_measured(recipe):
    tiny = ["--layouts", "zero1x2", "--rounds", "1", "--steps", "30", "--skip", "5", "--json"]
    found = json.loads(run("exact_cost.py", "--recipe", recipe, *tiny))
    (ratio,) = found["cpu_ratios"]["zero1x2"]
    assert math.isfinite(ratio) and ratio > 0
    sent = found["bytes_per_step_and_rank"]["zero1x2"]
    assert sent["exact"] / sent["fast"] == pytest.approx(1.5, abs=0.1)  # the reduce-scatter is twice as wide
    assert len(found["exact_last_losses"]) == 1


def test_the_cost_of_exact_mode_is_a_table_with_a_row_for_each_layout(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    exact_cost = importlib.import_module("exact_cost")
    ones = dict.fromkeys((field.name for field in fields(exact_cost.Observation)), 1.0)
    fast = exact_cost.Observation(**ones | {"cpu_us": 100.0, "peak_max_mib": 300.0})
    slow = exact_cost.Observation(**ones | {"cpu_us": 110.0, "peak_max_mib": 350.0})
    seen = {word: {"fast": fast, "exact": slow} for word in ("single", "ddp2")}
    sent = {"single": {"fast": 0.0, "exact": 0.0}, "ddp2": {"fast": 4e6, "exact": 8e6}}
    table = list(exact_cost.lines([seen, seen], sent, {2.5}, 0.5))
    rows = {line.split()[0]: line.split()[1:] for line in table if line.startswith(tuple(sent))}
    cpu, memory = ["100.0", "110.0", "1.100", "1.100", "..", "1.100"], ["300", "350", "50"]
    assert rows == {"single": [*cpu, "0.00", "0.00", "-", *memory], "ddp2": [*cpu, "4.00", "8.00", "2.00", *memory]}
    assert "the same in every run" in table[-1]
    assert "NOT exact" in list(exact_cost.lines([seen], sent, {2.5, 2.6}, 0.5))[-1]


def test_the_result_is_the_median_of_the_rounds_ratios(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    compare = importlib.import_module("compare")
    seen = dict.fromkeys((field.name for field in fields(compare.Observation)), 1.0)
    rounds = [
        {
            "meshwright": compare.Observation(**seen | {"cpu_us": ours}),
            "hand": compare.Observation(**seen | {"cpu_us": theirs, "loss": 1.0002}),
        }
        for ours, theirs in ((10.0, 10.0), (9.0, 10.0), (60.0, 50.0))
    ]
    found = compare.Comparison(compare.Layout(dp_replicate=2), rounds)
    table = "\n".join(compare.lines([found], 0.5, 40))
    row = next(line for line in table.splitlines() if line.startswith("CPU per token, ranks (us)"))
    assert row.split()[-6:] == ["10.0", "10.0", "1.000", "0.900", "..", "1.200"]
    assert "NOT the same" in table and "warning" not in table
