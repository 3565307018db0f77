"""Every data-parallel layout trains what one process trains: the matrix of contract 9 and of parity.

`make matrix` runs all of it and writes docs/matrix.md; `make test` runs a sample in which each pair of values occurs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from transformers import LlamaForCausalLM

from meshwright.spec.layout import parse_layout
from models.tiny_hf import write_config
from train.matrix import BOUNDS, COMPUTES, LAYOUTS, MODELS, STEPS, Cell, cell, sampled, table_of
from train.parity import distance, joined_ids, largest_distances

WARM = (LlamaForCausalLM,)
"""Imported here, so that ranks are forked with it."""

CELLS = [(layout, model, compute) for layout in LAYOUTS[1:] for model in MODELS for compute in COMPUTES]


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("hf") / "llama", "llama tied", attention_dropout=0.1)


@pytest.fixture(scope="module")
def run_cell(run_ranks, hf):
    """Cells of the matrix; each column's `single` is trained once."""
    known: dict[tuple[str, str], Cell] = {}

    def run(layout: str, model: str, compute: str) -> list[Cell]:
        fast, exact = (table_of(layout, model, compute, hf=hf, exact=exact) for exact in (False, True))
        return run_ranks(parse_layout(layout).world_size, cell, fast, exact, limit_s=240.0, timeout_s=60.0)

    def single(model: str, compute: str) -> Cell:
        if (model, compute) not in known:
            (known[model, compute],) = run("single", model, compute)
        return known[model, compute]

    run.single = single
    return run


@pytest.fixture(scope="module")
def page() -> Iterator[dict[tuple[str, str, str], str]]:
    """What the page shows of each cell; written where MESHWRIGHT_MATRIX says, once all cells are known."""
    shown: dict[tuple[str, str, str], str] = {}
    yield shown
    path = os.environ.get("MESHWRIGHT_MATRIX")
    if path and len(shown) == len(CELLS):
        Path(path).write_text(page_of(shown), encoding="utf-8")


@pytest.mark.parametrize(
    ("layout", "model", "compute"),
    [pytest.param(*each, marks=[] if sampled(*each) else pytest.mark.matrix) for each in CELLS],
)
def test_a_layout_trains_what_one_process_trains(run_cell, page, layout: str, model: str, compute: str) -> None:
    single, ranks = run_cell.single(model, compute), run_cell(layout, model, compute)
    assert joined_ids([each.fast for each in ranks]) == single.fast.ids
    worst = dict.fromkeys(BOUNDS[compute], 0.0)
    for each in ranks:
        assert each.fast.rates == single.fast.rates
        assert each.fast.losses == ranks[0].fast.losses
        far = largest_distances(each.fast, single.fast)
        worst = {name: max(worst[name], far[name]) for name in worst}
        assert (each.weights, each.moments, each.losses) == (single.weights, single.moments, single.losses)
    assert all(worst[name] <= BOUNDS[compute][name] for name in worst), f"{worst} against {BOUNDS[compute]}"
    page[layout, model, compute] = f"{worst['gradient']:.0e} ="


def test_exact_mode_is_as_near_to_fast_mode_as_fp32_is(run_cell) -> None:
    """The digests above say that all layouts agree; this, that what they agree on is the right training."""
    for model in MODELS:
        both = run_cell.single(model, "fp32")
        assert len(both.losses) == STEPS
        exact = [[float.fromhex(word) for word in line.split()] for line in both.losses]
        for (loss, norm), fast_loss, fast_norm in zip(exact, both.fast.losses, both.fast.norms, strict=True):
            assert abs(loss - fast_loss) <= BOUNDS["fp32"]["loss"] * fast_loss
            assert abs(norm - fast_norm) <= BOUNDS["fp32"]["norm"] * fast_norm


def test_each_column_is_another_training(run_cell) -> None:
    """Or a digest that never changes would pass."""
    columns = [run_cell.single(model, compute) for model in MODELS for compute in COMPUTES]
    assert len({each.weights for each in columns} | {each.moments for each in columns}) == 2 * len(columns)
    for each in columns:
        assert all(distance(a, b) > 1e-3 for a, b in pairwise(each.fast.gradients))


def page_of(shown: dict[tuple[str, str, str], str]) -> str:
    """docs/matrix.md."""
    head = f"""# The matrix

Made by `make matrix`. Each cell trains {STEPS} steps of 24 samples (12 microbatches of 2, ragged labels, dropout, full
recompute, clipping, AdamW with decay groups) on that layout, in fast and in exact mode, beside the same training in one
process. All dimensions are odd: no number of ranks divides them.

The number is fast mode's largest difference of a gradient from the one-process training, over all steps and relative
to the model's largest gradient. `=` says that in exact mode `weights_sha256`, the digest of the optimizer's state, and
every loss and gradient norm are those of one process, to the bit.
"""
    parts = [head]
    for compute in COMPUTES:
        parts.append(
            f"\n## {compute}\n\n| layout | {' | '.join(NAMES[m] for m in MODELS)} |\n|---|{'---|' * len(MODELS)}\n"
        )
        parts += [
            f"| `{layout}` | {' | '.join(shown[layout, model, compute] for model in MODELS)} |\n"
            for layout in LAYOUTS[1:]
        ]
    return "".join(parts)


NAMES = {
    "llama": "`llama`",
    "gpt2": "`gpt2`",
    "module": "a module with tied, shared, frozen and unused parts",
    "hf": "Hugging Face Llama, tied",
}
