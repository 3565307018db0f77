"""What each ZeRO stage holds, and when: gathered weights, whole gradients, this rank's share of everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from meshwright.parallel.leaves import local
from meshwright.spec.load import from_table
from meshwright.train.counts import counts_first
from meshwright.train.step import take_step
from meshwright.train.trainer import Trainer
from train.small import CLASSES, WIDTH, cross_entropy, small_table

Batch = Mapping[str, torch.Tensor]
BLOCK = WIDTH * WIDTH + WIDTH
HEAD = WIDTH * CLASSES + CLASSES


class Deep(nn.Module):
    """Four blocks, each a unit, and a head that is gathered with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def whole(model: nn.Module) -> int:
    """Elements of parameters that are gathered now."""
    return sum(p.numel() for p in model.parameters() if not isinstance(p, DTensor))


def whole_gradients(model: nn.Module) -> int:
    """Elements of whole gradients; gathered parameters have them beside them."""
    return sum(p.numel() for p in model.parameters() if not isinstance(p, DTensor) and p.grad is not None)


def held(world: Any, stage: int, sync: str | None, exact: bool) -> dict[str, Any]:
    """Elements held at each moment of a step of two microbatches, and by the optimizer after it."""
    table = small_table(
        1,
        model={"build": "test_stages:Deep"},
        batch={"global_batch_size": 8, "microbatch_size": 2},
        precision={"compute": "fp32"},
        data={"dtype": "float32"},
        layout={"dp_shard": 2, "zero_stage": stage},
        train={"reduction": "exact" if exact else "fast"} | ({"sync": sync} if sync else {}),
    )
    trainer = Trainer(from_table(table), world)
    stepper, model = trainer.stepper, trainer.model
    found: dict[str, Any] = {"before": whole(model), "in forward": []}
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: found["in forward"].append(whole(model)))
    mine = take_step(trainer.stream(0, 1), stepper.rules.batch)
    sums = stepper.begin(0)
    for microbatch, name in zip(mine, ("first", "last"), strict=True):
        pairs = stepper.forward(microbatch, reduce=stepper.reduces(microbatch))
        found[f"{name} forward"] = whole(model)
        stepper.backward(sums, microbatch, pairs, counts_first(stepper, mine, pairs))
        found[f"{name} backward"] = (whole(model), whole_gradients(model))
    stepper.gradients.retry()
    stepper.finish(sums, mine, [None])
    found["after"] = whole(model)
    found["parts"] = sum(local(p).numel() for p in model.parameters())
    states = [state for state in trainer.optimizer.state.values()]
    found["moments"] = sum(state["exp_avg"].numel() for state in states)
    return found


ALL = 4 * BLOCK + HEAD


@pytest.mark.parametrize(
    ("stage", "sync", "gathered", "gradients"),
    [
        (1, None, ALL, ALL),  # whole gradients wait for the last microbatch
        (1, "every", ALL, 0),
        (2, None, ALL, 0),  # whole weights, cut gradients
        (2, "last", ALL, ALL),
        (3, None, 0, 0),  # nothing between microbatches
    ],
)
def test_a_stage_holds_between_microbatches_what_it_says(run_ranks, stage, sync, gathered, gradients) -> None:
    for rank, found in enumerate(run_ranks(2, held, stage, sync, False)):
        assert found["before"] == found["after"] == found["last backward"][0] == 0
        assert found["first backward"] == (gathered, gradients)
        assert found["first forward"] == (ALL if stage < 3 else HEAD)
        # stage 3 has the head and the block that has just run, and not the ones before it
        most = ALL if stage < 3 else HEAD + BLOCK
        assert max(found["in forward"]) <= most and found["in forward"][0] == HEAD + BLOCK
        parts = [4 * (2 * WIDTH + 2) + 3 * WIDTH + 3, 4 * (2 * WIDTH + 2) + 2 * WIDTH + 2]  # 5 rows are cut 3 and 2
        assert found["parts"] == found["moments"] == parts[rank]


def test_in_exact_mode_the_moments_have_whole_vectors_and_nothing_else_is_added(run_ranks) -> None:
    for found in run_ranks(2, held, 3, None, True):
        assert found["first backward"] == (0, 0) and found["after"] == 0
        assert found["moments"] == 10 * 64  # ten parameters of less than a vector each


def loss_of_two(model: nn.Module, batch: Batch) -> Any:
    """Two pairs with counts of their own, which must be known before the first backward."""
    total, count = cross_entropy(model(batch["x"]), batch["labels"])
    return [(total, count), (0.1 * model(batch["x"]).square().sum(), float(len(batch["x"])))]


def losses(world: Any, layout: Mapping[str, int], exact: bool) -> list[tuple[float, float]]:
    table = small_table(
        3,
        model={"build": "test_stages:Deep"},
        loss={"build": "test_stages:loss_of_two"},
        layout=dict(layout),
        train={"reduction": "exact" if exact else "fast"},
    )
    trainer = Trainer(from_table(table), world)
    stream = trainer.stream(0, 3)
    return [(result.loss, result.grad_norm) for result in (trainer.stepper.step(stream) for _ in range(3))]


@pytest.mark.parametrize("exact", [False, True])
def test_several_pairs_and_a_model_that_is_called_twice_train_alike_when_cut(run_ranks, exact: bool) -> None:
    (single,) = run_ranks(1, losses, {}, exact)
    for stage in (1, 2, 3):
        for found in run_ranks(2, losses, {"dp_shard": 2, "zero_stage": stage}, exact):
            if exact:
                assert found == single
            for ours, theirs in zip(found, single, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-11)  # fp64 sums in another order
