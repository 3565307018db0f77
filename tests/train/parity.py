"""Train the same recipe on several layouts, and keep what must be equal: ids, rates, losses, gradients, weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.parallel.leaves import whole
from meshwright.spec.load import from_table
from meshwright.train.trainer import Parts, Trainer

SEQ_LEN = 24
VOCAB = 131

MODELS: dict[str, dict[str, Any]] = {
    # odd on purpose: no dimension divides another
    "llama": dict(
        name="llama", n_layers=2, d_model=36, n_heads=6, n_kv_heads=2, head_dim=10, d_ff=101, vocab_size=VOCAB
    ),
    "gpt2": dict(name="gpt2", n_layers=2, d_model=36, n_heads=4, d_ff=101, vocab_size=VOCAB),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": dict(name="sgd", lr=0.1, momentum=0.9, nesterov=True, max_grad_norm=0.5),
    "adamw": dict(
        name="adamw", lr=3e-3, weight_decay=0.1, max_grad_norm=0.5, groups=[dict(pattern="*norm*", weight_decay=0.0)]
    ),
}


class RaggedRows:
    """97 rows of random tokens, each with 1 to SEQ_LEN valid labels, which differ a lot between neighbours."""

    def __len__(self) -> int:
        return 97

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + i)
        tokens = torch.randint(0, VOCAB, (SEQ_LEN + 1,), generator=generator)
        valid = int(torch.randint(1, SEQ_LEN + 1, (), generator=generator)) if i % 3 else 1
        labels = tokens[1:].clone()
        labels[valid:] = -100
        return {"tokens": tokens[:-1], "labels": labels}


@dataclass(frozen=True)
class Record:
    """What one rank saw of a training."""

    ids: list[list[int]]
    rates: list[float]
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]


def recipe_table(
    model: str, compute: str, optimizer: str, steps: int = 30, **changes: Mapping[str, Any]
) -> dict[str, Any]:
    """12 samples a step in microbatches of 2, dropout, clipping, a schedule with warm-up."""
    table: dict[str, Any] = {
        "model": MODELS[model] | {"dropout": 0.1},
        "data": {"build": "train.parity:RaggedRows", "seq_len": SEQ_LEN, "workers": 0},
        "batch": {"global_batch_size": 12, "microbatch_size": 2},
        "optimizer": OPTIMIZERS[optimizer],
        "schedule": {"name": "cosine", "warmup_steps": 5},
        "precision": {"compute": compute},
        "train": {"steps": steps, "seed": 3},
        "record": {"memory": False},  # what is measured is test_measured_memory.py's
    }
    for section, values in changes.items():
        table[section] = table.get(section, {}) | values
    return table


def train(world: Any, table: Mapping[str, Any], parts: Parts | None = None) -> Record:
    """Train on this rank; gradients are those that the optimizer saw."""
    return record_of(Trainer(from_table(table), world, parts))


def record_of(trainer: Trainer) -> Record:
    """Train to the end; collective."""
    record = Record([], [], [], [], [], {})

    def keep_gradients(*_: Any) -> None:
        record.gradients.append(gradients_of(trainer))

    trainer.optimizer.register_step_pre_hook(keep_gradients)
    stream = trainer.stream(0, trainer.recipe.train.steps)
    for _ in range(trainer.recipe.train.steps):
        result = trainer.stepper.step(stream)
        record.ids.append(result.ids)
        record.rates.append(result.lr)
        record.losses.append(result.loss)
        record.norms.append(result.grad_norm)
    weights = {piece.name: piece.whole() for piece in trainer.state.weights()}
    record.weights.update({name: tensor.clone() for name, tensor in weights.items() if tensor is not None})
    return record


def gradients_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What the optimizer is given, whole; on rank 0 alone where tp or pp cut. Collective where anything is cut."""
    leaves, homes = trainer.stepper.gradients.leaves, trainer.state.homes
    parts = {leaf.name: (leaf.part(leaf.leaf.grad), leaf.parameter) for leaf in leaves if leaf.leaf.grad is not None}
    if not homes.is_spread:
        return {name: whole(part, parameter).clone() for name, (part, parameter) in parts.items()}
    idle = trainer.stepper.idle
    found = {name: homes.whole(name, *parts.get(name, (None, None))) for name in homes.homes if name not in idle}
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def joined_ids(ranks: list[Record]) -> list[list[int]]:
    """Sample ids of each step over all ranks, in the order of the microbatch grid."""
    return [[i for record in ranks for i in record.ids[step]] for step in range(len(ranks[0].ids))]


def distance(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Largest difference over the whole model, relative to its largest value (some true gradients are zero)."""
    assert ours.keys() == theirs.keys()
    top = max((float(t.abs().max()) for t in theirs.values()), default=0.0) or 1.0
    return max((float((ours[n].double() - theirs[n].double()).abs().max()) for n in theirs), default=0.0) / top


def largest_distances(ours: Record, theirs: Record) -> dict[str, float]:
    """How far two trainings are apart, at their worst step."""
    pairs = zip(ours.gradients, theirs.gradients, strict=True)
    return {
        "loss": max(abs(a - b) / (abs(b) or 1.0) for a, b in zip(ours.losses, theirs.losses, strict=True)),
        "norm": max(abs(a - b) / (abs(b) or 1.0) for a, b in zip(ours.norms, theirs.norms, strict=True)),
        "gradient": max(distance(a, b) for a, b in pairs),
        "weight": distance(ours.weights, theirs.weights),
    }
