"""Checkpoints between layouts with tensor and pipeline parallelism: every load is bit-equal to what was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.spec.layout import parse_layout
from train.runs import changed, loaded_in, rows, run_in, summary_of
from train.spread_matrix import table_of

LAYOUTS = ("tp2", "zero3x2+pp2", "single", "tp4", "tp2+pp2", "ddp2+tp2", "pp4", "zero3x2+tp2", "ddp2", "pp2")
FP64_BOUND = 1e-11
"""Sums in another order differ by about 1e-16 of their size; steps of AdamW let that grow."""


SMALL = {"model": {"n_layers": 2}, "batch": {"global_batch_size": 4}}


def recipe(layout: str, model: str, steps: int, **train: Any) -> dict[str, Any]:
    table = table_of(layout, "zbv" if layout == "pp2" else "", model, "fp64", exact=False)
    keeps = {"checkpoint": {"every_steps": 2, "keep_last": 99}}
    return changed(table, **keeps, train={"steps": steps, "recompute": "none", **train})


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("llama tied", LAYOUTS[:3]),
        pytest.param("llama tied", LAYOUTS, marks=pytest.mark.matrix),
        pytest.param("gpt2", LAYOUTS, marks=pytest.mark.matrix),
    ],
)
def test_a_run_that_changes_its_layout_every_2_steps_trains_what_one_process_trains(
    run_ranks, tmp_path, model: str, layouts
) -> None:
    steps, many = 2 * len(layouts), tmp_path / "many"
    for i, layout in enumerate(layouts):
        ranks, table = parse_layout(layout).world_size, recipe(layout, model, steps, stop_after=2 * (i + 1))
        if i:
            saved = many / f"checkpoints/step-{2 * i:08d}"
            weights, moments = run_ranks(ranks, loaded_in, table, str(many), limit_s=120.0)[0]
            for held, name in ((weights, "model"), (moments, "optimizer")):
                wanted = load_file(saved / f"{name}.safetensors")
                assert held.keys() == wanted.keys()
                assert all(torch.equal(held[key], wanted[key]) for key in wanted), (layout, name)
        run_ranks(ranks, run_in, table, str(many), i > 0, limit_s=120.0)
        manifest = json.loads((many / f"checkpoints/step-{2 * (i + 1):08d}/manifest.json").read_text())
        assert manifest["layout"] == layout
    run_ranks(1, run_in, recipe("single", model, steps), str(tmp_path / "one"), limit_s=120.0)
    for ours, theirs in zip(rows(many), rows(tmp_path / "one"), strict=True):
        assert {**ours, "loss": 0, "grad_norm": 0} == {**theirs, "loss": 0, "grad_norm": 0}
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=FP64_BOUND)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=FP64_BOUND)
    assert summary_of(many)["status"] == "done"


@pytest.mark.parametrize("layout", ["tp2", "pp2", pytest.param("tp2+pp2", marks=pytest.mark.matrix)])
def test_exact_mode_under_tp_says_so_and_is_the_same_twice(run_ranks, tmp_path, layout: str) -> None:
    """Contract 9: bit-identical from run to run under tp; under pp without tp, to one process."""
    found = []
    for name in ("one", "two"):
        table = changed(table_of(layout, "", "gpt2", "fp32", exact=True), train={"steps": 2}, **SMALL)
        told = run_ranks(parse_layout(layout).world_size, run_in, table, str(tmp_path / name), limit_s=120.0)
        found.append(summary_of(tmp_path / name)["weights_sha256"])
        said = "tp cuts inside matrix products" in told[0].out + told[0].err
        assert said == ("tp" in layout)
    assert found[0] == found[1]


def test_shapes_in_checkpoints_are_those_of_the_model_and_not_of_parts(run_ranks, tmp_path) -> None:
    """B078: 131 tokens on 4 ranks are 131 rows, whatever the parts; a table tied over stages is there once."""
    run_ranks(4, run_in, changed(recipe("tp4", "llama tied", 2), **SMALL), str(tmp_path), limit_s=120.0)
    held = load_file(Path(tmp_path) / "checkpoints/step-00000002/model.safetensors")
    assert tuple(held["embedding.weight"].shape) == (131, 36)
    assert "head.weight" not in held
    assert tuple(held["blocks.0.attention.key.weight"].shape) == (20, 36)
    assert tuple(held["blocks.1.feed_forward.down.weight"].shape) == (36, 101)
