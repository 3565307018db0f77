import importlib
import json
import math
import subprocess
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

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


def test_both_sides_are_the_same_training_and_every_ratio_is_a_number(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    tiny = ["--recipe", str(recipe), "--rounds", "1", "--steps", "60", "--skip", "5", "--no-warm-up", "--json"]
    command = [sys.executable, str(BENCH / "compare.py"), *tiny]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["losses_equal"] and found["largest_loss_difference"] <= 1e-4
    ratios = found["ratios"]["hand"]
    assert {"cpu_us", "tokens_per_s", "first_step_s", "peak_max_mib", "peak_sum_mib"} <= set(ratios)
    for name, values in ratios.items():
        assert len(values) == 1 and math.isfinite(values[0]) and values[0] > 0, name


def test_the_result_is_the_median_of_the_rounds_ratios(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    compare = importlib.import_module("compare")
    seen = dict.fromkeys((field.name for field in fields(compare.Observation)), 1.0)
    rounds = [
        {
            "meshwright": compare.Observation(**seen | {"cpu_us": ours}),
            "hand": compare.Observation(**seen | {"cpu_us": theirs}),
        }
        for ours, theirs in ((10.0, 10.0), (9.0, 10.0), (60.0, 50.0))
    ]
    table = "\n".join(compare.lines(rounds, 2e-4, 0.5, Namespace(nproc=2, steps=40)))
    row = next(line for line in table.splitlines() if line.startswith("CPU per token, ranks (us)"))
    assert row.split()[-6:] == ["10.0", "10.0", "1.000", "0.900", "..", "1.200"]
    assert "NOT the same" in table and "warning" not in table
