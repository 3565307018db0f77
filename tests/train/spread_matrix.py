"""The matrix of tensor and pipeline parallelism: layouts, schedules, models, and what a cell of it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.spec.layout import parse_layout
from meshwright.spec.load import from_table
from meshwright.spec.sections import PP_SCHEDULES
from meshwright.train.state import digest_of
from meshwright.train.trainer import Trainer
from train.matrix import IS_WHOLE
from train.parity import Record, recipe_table, record_of

LAYOUTS = ("tp2", "tp4", "zero3x2+tp2", "ddp2+tp2", "hsdp2x2+tp2")
"""Without a pipeline."""

PIPED = ("pp2", "pp4", "ddp2+pp2", "zero3x2+pp2", "zero2x2+pp2", "tp2+pp2", "zero3x2+tp2+pp2")
SPLIT = ("interleaved-zero-bubble", "zbv")
"""Backward passes in two halves, which ZeRO-3 must not free weights between, and which do not go with recompute."""

MODELS = ("llama", "llama tied", "gpt2", "gpt2 tied")
STEPS = 2 if IS_WHOLE else 1

CASES = [
    *((layout, "") for layout in LAYOUTS),
    *((w, s) for w in PIPED for s in PP_SCHEDULES if not (s in SPLIT and "zero3" in w)),
]

Cell = tuple[str, str, str]
CELLS: list[Cell] = [(layout, schedule, model) for layout, schedule in CASES for model in MODELS]


def sampled(cell: Cell) -> bool:
    """Each layout, each schedule and each model stand in some cell of the sample."""
    layout, schedule, model = cell
    case, number = CASES.index((layout, schedule)), MODELS.index(model)
    return case % 3 == 0 and (case // 3) % len(MODELS) == number


def layers_of(layout: str) -> int:
    """As few as divide into no number of stages, of which a rank may have two."""
    return 2 * max(parse_layout(layout).pp, 2) + 1


def table_of(layout: str, schedule: str, model: str, compute: str, *, exact: bool, n_layers: int = 9) -> dict[str, Any]:
    """16 samples a step in 8 microbatches of 2: ragged labels, dropout, recompute, clipping, groups.

    5 and 9 layers divide into no number of stages; 131 tokens and 101 hidden units into no number of ranks; Llama has
    8 query heads for 2 key and value heads, fewer than 4 tp ranks.
    """
    name, _, tied = model.partition(" ")
    table = recipe_table(name, compute, "adamw", STEPS)
    sizes = {"n_layers": n_layers, "tied_embeddings": bool(tied)}
    sizes |= {"n_heads": 8, "n_kv_heads": 2} if name == "llama" else {"n_heads": 4}
    degrees = parse_layout(layout)
    table["model"] = table["model"] | sizes
    table["batch"] = {"global_batch_size": 16, "microbatch_size": 2}
    table["schedule"] = {"name": "cosine", "warmup_steps": 1}
    names = ("dp_replicate", "dp_shard", "zero_stage", "tp", "pp")
    table["layout"] = {name: getattr(degrees, name) for name in names} | ({"pp_schedule": schedule} if schedule else {})
    recompute = "none" if schedule in SPLIT else ("none", "selective", "full")[len(schedule) % 3]
    table["train"] |= {"recompute": recompute, "reduction": "exact" if exact else "fast"}
    return table


def trainings(world: Any, *tables: Mapping[str, Any]) -> list[tuple[Record, str]]:
    """Each training on this rank, in one world, with one digest of weights and optimizer state (on rank 0)."""
    found = []
    for table in tables:
        trainer = Trainer(from_table(table), world)
        record, state = record_of(trainer), trainer.state
        digests = [digest_of(pieces, world.speaks) for pieces in (state.weights(), state.moments())]
        found.append((record, " ".join(digests)))
    return found
