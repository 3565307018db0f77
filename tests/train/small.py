"""A small model and ragged data of one's own, and the loop that one would write for one process and one big batch."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import default_collate

from meshwright.models.build import build_model
from meshwright.models.digest import state_items
from meshwright.models.resolve import resolve_callable
from meshwright.spec.load import from_table
from meshwright.spec.schedule import lr_multiplier
from meshwright.train.run import begin_run
from train.parity import Record, train

IGNORED = -100
SLOTS, WIDTH, CLASSES = 7, 4, 5


class Points:
    """Samples of SLOTS points each, of which 1 to SLOTS carry a class."""

    def __init__(self, size: int = 101, equal: bool = False, dtype: str = "float64") -> None:
        self.size, self.equal, self.dtype = size, equal, getattr(torch, dtype)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(SLOTS, WIDTH, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, CLASSES, (SLOTS,), generator=generator)
        if not self.equal:
            labels[(1 if i % 3 else SLOTS) + i % 2 :] = IGNORED
        return {"x": x.to(self.dtype), "labels": labels}


class Net(nn.Module):
    """(b, SLOTS, WIDTH) -> (b, SLOTS, CLASSES)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 6), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return cross_entropy(model(batch["x"]), batch["labels"])


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def small_table(steps: int = 4, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """12 samples a step in microbatches of 2, fp64, AdamW, clipped."""
    table: dict[str, Any] = {
        "model": {"build": "train.small:Net"},
        "data": {"build": "train.small:Points", "workers": 0},
        "loss": {"build": "train.small:loss"},
        "batch": {"global_batch_size": 12, "microbatch_size": 2},
        "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.3},
        "precision": {"compute": "fp64"},
        "train": {"steps": steps, "seed": 5},
        "record": {"memory": False},  # what is measured is test_measured_memory.py's
    }
    for section, values in changes.items():
        table[section] = table.get(section, {}) | values
    return table


def by_hand(
    table: Mapping[str, Any],
    ids: Sequence[Sequence[int]],
    make_optimizer: Callable[..., torch.optim.Optimizer],
    divide: Callable[[Any], torch.Tensor] = lambda result: result[0] / result[1],
) -> Record:
    """Train on these samples in one process, each step one big batch, with torch alone.

    Args:
        table: names model, data and loss, schedule and clipping.
        ids: samples of each step.
        make_optimizer: from parameters and lr.
        divide: from what the loss function returns for the big batch to the mean.
    """
    recipe = from_table(table)
    model = build_model(recipe.model, seq_len=1, tokenizer_vocab=None, seed=recipe.train.seed, dtype=torch.float64)
    data = resolve_callable(recipe.data.build or "", "data.build")(**recipe.data.arguments)
    loss_of = resolve_callable(recipe.loss.build or "", "loss.build")
    optimizer = make_optimizer(model.parameters(), lr=recipe.optimizer.lr)
    record = Record([], [], [], [], [], {})
    for step, samples in enumerate(ids):
        mean = divide(loss_of(model, default_collate([data[i] for i in samples])))
        optimizer.zero_grad()
        mean.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.max_grad_norm or float("inf"))
        rate = recipe.optimizer.lr * lr_multiplier(recipe.schedule, recipe.train.steps, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        record.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        record.ids.append(list(samples))
        record.losses.append(float(mean.detach()))
        record.norms.append(float(norm))
        record.rates.append(rate)
    record.weights.update({n: t.detach().clone() for n, t in sorted(model.state_dict().items())})
    return record


def trained(world: Any, tables: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Several trainings, one after the other on the same ranks, which have to come together only once."""
    return [train(world, table) for table in tables]


def whole_run(world: Any, table: dict[str, Any]) -> tuple[dict[str, torch.Tensor], str, dict[str, Any]]:
    """State of the model at the end, what was said on stderr, the summary."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        run = begin_run(from_table(table), None, resume=False, world=world, progress=False)
        stream = run.trainer.stream(0, run.end)
        for _ in range(run.end):
            run.step(stream)
        summary = run.finish()
    return {n: t.detach().clone() for n, t in state_items(run.trainer.model)}, said.getvalue(), summary
