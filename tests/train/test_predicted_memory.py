"""What the planner's formulas say that a run will hold, beside what it was measured to hold, moment by moment."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.models.gpt2 import Gpt2
from meshwright.models.llama import Llama
from meshwright.models.trace import trace_module
from meshwright.parallel.recompute import selective_contexts
from meshwright.plan.forecast import forecast
from meshwright.spec.layout import parse_layout
from meshwright.spec.load import from_table
from meshwright.spec.model_spec import ModelSpec
from meshwright.spec.moments import MOMENTS
from meshwright.spec.recipe import Recipe
from meshwright.spec.shape import resolve_shape
from meshwright.train.foresight import Foresight
from meshwright.train.loss import token_cross_entropy
from meshwright.train.run import run_recipe
from train.measuring import degrees, memory_of, ranks_of

SEQ_LEN, SIZES = 128, {"n_layers": 4, "d_model": 96, "n_heads": 4, "dropout": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"name": "llama", "n_kv_heads": 2, "d_ff": 260, "vocab_size": 1500},
    "deep": {"name": "llama", "n_kv_heads": 4, "d_ff": 384, "vocab_size": 256, "n_layers": 6},
    "gpt2": {"name": "gpt2", "vocab_size": 1201},
}
"""The peak of `llama` and `gpt2` is at the loss, that of `deep` in the backward pass of its blocks."""

LAYOUTS = ("single", "ddp2", "ddp3", "zero1x2", "zero2x2", "zero3x2", "zero3x3", "zero3x4", "hsdp2x2")
TOLERANCE = 0.03
"""The issue's own; the largest error seen is printed by `make matrix`. What the formulas leave out: the numbers that a
step sends with its sums, rows of microbatches that wait, and the rounding of shards up to whole rows."""


def table_of(
    model: str, layout: str, compute: str, microbatches: int, recompute: str, reduction: str
) -> dict[str, Any]:
    ranks = ranks_of(layout)
    return {
        "model": SIZES | MODELS[model],
        "data": {
            "source": "text",
            "path": str(Path(__file__).with_name("test_re*.py")),
            "seq_len": SEQ_LEN,
            "tokenizer": "bytes",
        },
        "batch": {"global_batch_size": 4 * ranks * microbatches, "microbatch_size": 4},
        "optimizer": {"name": "adamw", "lr": 1e-3, "max_grad_norm": 1.0},
        "precision": {"compute": compute},
        "layout": degrees(layout),
        "train": {"steps": 3, "recompute": recompute, "reduction": reduction},
    }


@cache
def described(model: str, compute: str) -> ModelSpec:
    section = from_table(table_of(model, "single", compute, 1, "none", "fast")).model
    with torch.device("meta"):
        module = (Gpt2 if section.name == "gpt2" else Llama)(resolve_shape(section, SEQ_LEN, 256))

    def batch_of(size: int) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(size, SEQ_LEN, dtype=torch.int64) for name in ("tokens", "labels")}

    return trace_module(
        module, token_cross_entropy, batch_of, compute=compute, kernels="cpu", seq_len=SEQ_LEN, name=model,
        selective=partial(selective_contexts, "block"),
    )  # fmt: skip


def errors(recipe: Recipe, layout: str, model: str, measured: dict[str, Any]) -> dict[str, float]:
    predicted = forecast(recipe, parse_layout(layout), "cpu", described(model, recipe.precision.compute))
    return {moment: sum(predicted[moment].values()) / measured[moment]["measured_bytes"] - 1 for moment in MOMENTS}


VARIANTS = [
    ("llama", "fp32", 1, "none", "fast"),
    ("llama", "bf16", 3, "none", "fast"),
    ("deep", "fp32", 3, "none", "fast"),
    ("deep", "bf16", 1, "full", "fast"),
    ("gpt2", "bf16", 3, "selective", "fast"),
    ("gpt2", "fp32", 1, "full", "exact"),
    ("deep", "bf16", 3, "selective", "exact"),
]
CELLS = [(layout, *variant) for layout in LAYOUTS for variant in VARIANTS]
SAMPLED = {"single": 0, "ddp2": 2, "zero3x2": 4, "zero2x2": 5}
SAMPLE = {(layout, *VARIANTS[i]) for layout, i in SAMPLED.items()}
"""Each kind of layout once; each model, compute type, recompute mode and reduction."""


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=[] if cell in SAMPLE else pytest.mark.matrix, id=" ".join(map(str, cell)))
        for cell in CELLS
    ],
)
def test_a_run_holds_what_was_predicted(run_ranks, tmp_path, cell) -> None:
    layout, model, compute, microbatches, recompute, reduction = cell
    table = table_of(model, layout, compute, microbatches, recompute, reduction)
    memory, _ = run_ranks(ranks_of(layout), memory_of, table, str(tmp_path))[0]
    assert memory["measured"] is not None, memory["because"]
    found = errors(from_table(table), layout, model, memory["measured"])
    print({moment: f"{error:+.3%}" for moment, error in found.items()})
    assert {moment: error for moment, error in found.items() if abs(error) > TOLERANCE} == {}


def foretold(world: Any, table: dict[str, Any], folder: str) -> None:
    run_recipe(from_table(table), Path(folder), resume=False, world=world, foresight=Foresight(forecast=forecast))


def test_a_run_writes_what_was_predicted_of_it_beside_what_was_measured(run_ranks, tmp_path) -> None:
    table = table_of("llama", "zero2x2", "bf16", 2, "none", "fast")
    run_ranks(2, foretold, table, str(tmp_path))
    memory = json.loads((tmp_path / "memory.json").read_text())
    assert memory["because"] == ""
    assert list(memory["predicted"]) == list(memory["measured"]) == list(MOMENTS)
    expected = forecast(from_table(table), parse_layout("zero2x2"), "cpu", described("llama", "bf16"))
    for moment, row in memory["predicted"].items():
        assert row["terms"] == expected[moment]
        assert row["predicted_bytes"] == sum(row["terms"].values())
        assert abs(row["error"]) < TOLERANCE
