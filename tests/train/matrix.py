"""The matrix of layouts: what is trained, on what, in which arithmetic, and how far it may be from one process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from meshwright.spec.layout import parse_layout
from meshwright.spec.load import from_table
from meshwright.train.state import digest_of
from meshwright.train.trainer import Trainer
from train.parity import SEQ_LEN, VOCAB, Record, recipe_table, record_of

LAYOUTS = (
    *("single", "ddp2", "ddp3", "ddp4", "zero1x2", "zero1x3", "zero2x2", "zero2x3"),
    *("zero3x2", "zero3x3", "zero3x4", "zero3x6", "hsdp2x2"),
)
MODELS = ("llama", "gpt2", "module", "hf")
COMPUTES = ("fp64", "fp32", "bf16")
IS_WHOLE = "MESHWRIGHT_MATRIX" in os.environ
"""`make test` runs a sample, and shorter ones."""

STEPS = 3 if IS_WHOLE else 1

BOUNDS: dict[str, dict[str, float]] = {
    # Sums of 12 microbatches in another order round differently by about 1e-16 of their largest term; a few steps let
    # that grow.
    "fp64": dict.fromkeys(("loss", "norm", "gradient", "weight"), 1e-11),
    # One fp32 rounding is 6e-8. A gradient is a sum of 12 microbatches, cut at 1 to 5 places: some roundings of its
    # largest terms. AdamW divides by the gradient's own size: where the true gradient is near zero, rounding decides
    # the direction of steps of up to lr = 3e-3, and nothing else sees it.
    "fp32": {"loss": 1e-6, "norm": 2e-6, "gradient": 1e-5, "weight": 3e-3},
    # Weights that differ in the last fp32 bits are sometimes cast to neighbouring bf16 numbers, 2**-8 apart; the sums
    # that they go into then differ by that share of one term, in losses and gradients alike.
    "bf16": {"loss": 1e-3, "norm": 1e-2, "gradient": 2e-2, "weight": 3e-3},
}


class Block(nn.Module):
    """(b, s, 12) -> (b, s, 12), with one layer that is not trained, and parameters smaller than any group."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 19), nn.Linear(19, 12)
        self.scale, self.dropout = nn.Parameter(torch.full((1,), 0.7)), nn.Dropout(0.1)
        self.up.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Mixed(nn.Module):
    """Tokens (b, s) -> logits (b, s, VOCAB), with what makes sharding hard.

    The head is tied to the embedding; the first and the last block are one module; each block, and the model as a
    whole, has frozen parts; one layer is never used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen, self.never = nn.Linear(12, 12), nn.Linear(5, 3)
        self.head = nn.Linear(12, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.linspace(-1, 1, SEQ_LEN)[:, None])
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return self.head(self.frozen(x))


def table_of(
    layout: str, model: str, compute: str, *, hf: Path | str, exact: bool, steps: int = STEPS
) -> dict[str, Any]:
    """24 samples a step in 12 microbatches of 2, ragged labels, dropout, recompute, clipping, decay groups."""
    table = recipe_table("gpt2" if model == "gpt2" else "llama", compute, "adamw", steps)
    if model == "module":
        table["model"] = {"build": "train.matrix:Mixed"}
    if model == "hf":
        table["model"] = {"hf": str(hf)}
    degrees = parse_layout(layout)
    names = ("dp_replicate", "dp_shard", "zero_stage", "tp", "pp")
    table["layout"] = {name: getattr(degrees, name) for name in names}
    table["batch"] = {"global_batch_size": 24, "microbatch_size": 2}
    table["schedule"] = {"name": "cosine", "warmup_steps": 1}
    table["train"] |= {"recompute": "full", "reduction": "exact" if exact else "fast"}
    return table


@dataclass(frozen=True)
class Cell:
    """What a layout makes of one column.

    Attributes:
        fast: the training in fast mode.
        weights: `weights_sha256` in exact mode.
        moments: the same of the optimizer's state.
        losses: in exact mode, as hexadecimal numbers.
    """

    fast: Record
    weights: str
    moments: str
    losses: list[str]


def cell(world: Any, fast: Mapping[str, Any], exact: Mapping[str, Any]) -> Cell:
    """Both trainings on this rank, in one world."""
    record = record_of(Trainer(from_table(fast), world))
    trainer = Trainer(from_table(exact), world)
    again = record_of(trainer)
    state = trainer.state
    weights, moments = (digest_of(pieces, True) for pieces in (state.weights(), state.moments()))
    return Cell(
        record, weights, moments, [f"{x.hex()} {y.hex()}" for x, y in zip(again.losses, again.norms, strict=True)]
    )


def sampled(layout: str, model: str, compute: str) -> bool:
    """Each pair of two values stands in some cell of the sample: 4 models and 3 types go round the layouts."""
    return (LAYOUTS.index(layout) + MODELS.index(model)) % len(COMPUTES) == COMPUTES.index(compute)
