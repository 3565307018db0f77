"""Validation: each held-out sample once, the same answer on every rank, and no trace of it in the training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.utils.data import default_collate

from meshwright.errors import DataError
from meshwright.models.digest import state_items
from meshwright.spec.batch import BatchPlan
from meshwright.spec.load import from_table
from meshwright.train.evaluate import evaluate, held_out_places
from meshwright.train.order import Split
from meshwright.train.trainer import Trainer
from train.parity import train
from train.small import SLOTS, WIDTH, Net, cross_entropy, loss, small_table

BOUND = 1e-12
"""fp64 sums in another order differ by 1e-16 of themselves."""


class Restless(nn.Module):
    """Dropout and a batch norm: what an evaluation must switch off and leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.net = nn.BatchNorm1d(SLOTS * WIDTH), nn.Dropout(0.5), Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.drop(self.norm(x.flatten(1))).view_as(x))


def held_out(size: int, fraction: float, batch: int, micro: int, **changes: Any) -> dict[str, Any]:
    table = small_table(
        2,
        model={"build": "test_evaluate:Restless"},
        data={"build": "train.small:Points", "size": size},
        batch={"global_batch_size": batch, "microbatch_size": micro},
        **changes,
    )
    return table | {"validation": {"fraction": fraction}}


def validated(world: Any, table: dict[str, Any]) -> dict[str, Any]:
    trainer = Trainer(from_table(table), world)
    before = {n: t.clone() for n, t in state_items(trainer.model)}
    found = [evaluate(trainer.stepper, trainer.source, trainer.split) for _ in range(2)]
    by_hand = None
    if world.world_size == 1:
        ids = trainer.split.held_out_ids(np.arange(trainer.split.num_held_out))
        trainer.model.eval()
        with torch.no_grad():
            total, count = loss(trainer.model, default_collate([trainer.source.dataset[int(i)] for i in ids]))
        by_hand = float(total / count)
        trainer.model.train()
    same = {n: torch.equal(t, before[n]) for n, t in state_items(trainer.model)}
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    return {
        "found": found,
        "by_hand": by_hand,
        "same": all(same.values()) and not gradients,
        "training": all(m.training for m in trainer.model.modules()),
    }


CASES = [
    pytest.param(20, 0.5, 10, 3, 3, 1, id="B028: 10 samples on 3 ranks"),
    pytest.param(42, 0.5, 21, 2, 4, 2, id="B029: 21 samples on 2 ranks"),
    pytest.param(28, 0.5, 14, 2, 4, 2, id="B045: 7 batches on 2 ranks"),
    pytest.param(20, 0.05, 1, 3, 6, 2, id="1 sample on 3 ranks"),
    pytest.param(20, 0.45, 9, 1, 5, 5, id="B031: 9 samples, batch 5, drop"),
]


@pytest.mark.parametrize(("size", "fraction", "samples", "ranks", "batch", "micro"), CASES)
def test_b028_b029_b031_b045_each_held_out_sample_counts_once(
    run_ranks, size: int, fraction: float, samples: int, ranks: int, batch: int, micro: int
) -> None:
    table = held_out(size, fraction, batch if batch % (ranks * micro) == 0 else ranks * micro, micro)
    (single,) = run_ranks(1, validated, table)
    for one in [single, *run_ranks(ranks, validated, table)]:
        (value, count), again = one["found"]
        assert count == samples and again == (value, count)
        assert abs(value - single["by_hand"]) <= BOUND * single["by_hand"]
        assert one["same"] and one["training"]


def test_b065_every_rank_gets_the_same_number_to_the_bit(run_ranks) -> None:
    """Ranks that decide by it (is this the best so far?) then decide alike."""
    values = [one["found"][0] for one in run_ranks(3, validated, held_out(101, 0.3, 12, 2))]
    assert values[0] == values[1] == values[2] and math.isfinite(values[0][0])


@pytest.mark.parametrize(("samples", "micro", "ranks"), [(10, 1, 3), (21, 2, 2), (7, 3, 4), (1, 4, 3)])
def test_ranks_run_as_many_passes_each(samples: int, micro: int, ranks: int) -> None:
    split, plan = Split(samples * 2, 0.5, 0), BatchPlan(micro * ranks, micro, ranks)
    places = [list(held_out_places(split, plan, rank)) for rank in range(ranks)]
    assert len({len(one) for one in places}) == 1
    ids = [i for one in places for place in one for i in place.ids.tolist()]
    assert ids == split.held_out_ids(np.arange(samples)).tolist()
    assert all(len(place.read) for one in places for place in one)


def test_validating_in_between_changes_nothing_of_the_training(run_ranks) -> None:
    table = held_out(60, 0.2, 12, 2)
    plain = run_ranks(2, train, table)[0]
    losses, weights = run_ranks(2, validating, table)[0]
    assert losses == plain.losses
    assert all(torch.equal(weights[n], t) for n, t in plain.weights.items())


def validating(world: Any, table: dict[str, Any]) -> Any:
    trainer = Trainer(from_table(table), world)
    stream, losses = trainer.stream(0, 2), []
    for _ in range(2):
        losses.append(trainer.stepper.step(stream).loss)
        evaluate(trainer.stepper, trainer.source, trainer.split)
    return losses, {n: t.detach().clone() for n, t in state_items(trainer.model)}


def pairs(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    logits = model(batch["x"])
    return [cross_entropy(logits, batch["labels"]), (logits.square().sum(), len(logits) * 0.25)]


def test_several_pairs_and_counts_below_one_are_divided_each_by_its_own(run_ranks) -> None:
    table = held_out(10, 0.1, 2, 1)
    table["loss"] = {"build": "test_evaluate:pairs"}
    (single,), two = run_ranks(1, validated, table), run_ranks(2, validated, table)
    (value, count), _ = single["found"]
    assert count == 1 and abs(two[0]["found"][0][0] - value) <= BOUND * value


def test_a_share_too_small_for_one_sample_is_refused(run_ranks) -> None:
    with pytest.raises(DataError, match=r"holds out 20 x 0.04 = 0 whole samples.*0.05"):
        run_ranks(1, validated, held_out(20, 0.04, 2, 1))


def test_held_out_samples_are_never_trained_on(run_ranks) -> None:
    record = run_ranks(1, train, held_out(40, 0.25, 10, 2) | {"train": {"steps": 9, "seed": 5}})[0]
    trained = {i for ids in record.ids for i in ids}
    held = set(Split(40, 0.25, 5).held_out_ids(np.arange(10)).tolist())
    assert len(trained) == 30 and not trained & held
