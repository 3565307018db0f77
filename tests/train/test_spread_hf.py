"""Hugging Face models over stages of a pipeline and over tp ranks: what one process trains."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
from transformers import LlamaForCausalLM

from meshwright.spec.layout import parse_layout
from meshwright.spec.load import from_table
from meshwright.train.state import digest_of
from meshwright.train.trainer import Trainer
from models.tiny_hf import write_config, write_model
from train.matrix import BOUNDS
from train.parity import largest_distances
from train.spread_matrix import table_of, trainings

WARM = (LlamaForCausalLM,)
"""Imported here, so that ranks are forked with it."""

CASES = [
    ("llama tied", "pp2", "zbv", True),
    ("qwen3", "pp2", "1f1b", True),
    ("qwen2", "tp2", "", False),
    ("llama tied", "zero1x2+pp2", "interleaved-zero-bubble", True),
    ("mistral", "tp2+pp2", "gpipe", False),
    ("phi3", "pp2", "interleaved1f1b", True),
    ("llama tied", "zero3x2+tp2", "", False),
]


def of_hf(layout: str, schedule: str, folder: Any, exact: bool) -> dict[str, Any]:
    """Of a folder; attention drops out nothing, or it would not be as fused kernels have it."""
    table = table_of(layout, schedule, "llama", "fp32", exact=exact)
    table["model"] = {"hf": str(folder)}
    table["train"] |= {"recompute": "none"}
    if parse_layout(layout).pp == 1:
        table["layout"].pop("pp_schedule", None)
    return table


@pytest.mark.parametrize(
    ("name", "layout", "schedule", "exact"),
    [pytest.param(*case, marks=[] if i in (0, 2) else pytest.mark.matrix) for i, case in enumerate(CASES)],
)
def test_a_hugging_face_model_trains_what_one_process_trains(
    run_ranks, tmp_path, name: str, layout: str, schedule: str, exact: bool
) -> None:
    folder = write_model(tmp_path / "model", name, num_hidden_layers=5)
    ((one, digest),) = run_ranks(1, trainings, of_hf("single", schedule, folder, exact), limit_s=100.0)[0]
    ranks = parse_layout(layout).world_size
    ((many, found),) = run_ranks(ranks, trainings, of_hf(layout, schedule, folder, exact), limit_s=100.0)[0]
    if exact:
        assert (found, many.losses, many.norms) == (digest, one.losses, one.norms)
    far, bound = largest_distances(many, one), BOUNDS["fp32"]
    assert all(far[key] <= 4 * bound[key] for key in far), far  # 4: tp rounds inside matrix products too


def first_digest(world: Any, table: dict[str, Any]) -> str:
    return digest_of(Trainer(from_table(table), world).state.weights(), world.speaks)


def test_a_config_alone_starts_from_one_set_of_weights_on_stages_and_parts_too(run_ranks, tmp_path) -> None:
    folder = write_config(tmp_path / "llama", "llama tied", num_hidden_layers=4)
    tables = {layout: of_hf(layout, "1f1b", folder, False) for layout in ("single", "pp2", "tp2")}
    assert len({run_ranks(parse_layout(word).world_size, first_digest, t)[0] for word, t in tables.items()}) == 1
