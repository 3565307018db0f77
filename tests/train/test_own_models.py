"""Modules that do what modules of one's own do: skip parameters, have methods, share, freeze, come wrapped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshwright.errors import SpecError
from meshwright.spec.load import from_table
from meshwright.train.trainer import Parts, Trainer
from train.parity import Record, joined_ids, largest_distances, train
from train.small import CLASSES, WIDTH, Net, by_hand, cross_entropy, loss, small_table, whole_run

BOUND = 1e-11
"""fp64 sums in another order differ by 1e-16 of themselves; a few steps let that grow."""

Batch = Mapping[str, torch.Tensor]


class Branches(nn.Module):
    """Each sample goes through one of two branches; a third is never used; one layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.frozen = Net(), nn.Linear(CLASSES, CLASSES)
        self.left, self.right = nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES)
        self.never = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, left = self.frozen(self.body(x)), x[:, 0, 0] > 0
        out = hidden.clone()
        for rows, branch in ((left, self.left), (~left, self.right)):
            if rows.any():  # a branch that no sample of the microbatch takes is not called
                out[rows] = branch(hidden[rows])
        return out


def optimizer(name: str) -> tuple[dict[str, Any], Any]:
    if name == "sgd":
        options = {"momentum": 0.9, "weight_decay": 0.1}
        return {"name": "sgd", "lr": 0.1, **options}, lambda p, lr: torch.optim.SGD(p, lr=lr, **options)
    return {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}, lambda p, lr: torch.optim.AdamW(
        p, lr=lr, weight_decay=0.1
    )


def table_of(model: str, steps: int = 6, **changes: Any) -> dict[str, Any]:
    return small_table(steps, model={"build": f"test_own_models:{model}"}, **changes)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_b098_parameters_without_a_gradient_are_left_alone_as_in_one_process(run_ranks, name: str) -> None:
    """In some steps neither rank uses a branch: no decay, no momentum. One sample a microbatch, two a step."""
    section, make = optimizer(name)
    for ranks in (1, 2):
        table = table_of("Branches", batch={"global_batch_size": 2, "microbatch_size": 1})
        table["optimizer"] = section
        records: list[Record] = run_ranks(ranks, train, table)
        one = by_hand(table, joined_ids(records), make)
        sides = [tuple(side for side in ("left", "right") if f"{side}.weight" in g) for g in one.gradients]
        assert {("left", "right"), ("left",), ("right",)} <= set(sides)
        for record in records:
            assert [set(g) for g in record.gradients] == [set(g) for g in one.gradients]
            ordered = Record(**vars(record) | {"gradients": [dict(sorted(g.items())) for g in record.gradients]})
            one.gradients[:] = [dict(sorted(g.items())) for g in one.gradients]
            far = largest_distances(ordered, one)
            assert all(x <= BOUND for x in far.values()), far


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_branches_accumulate_and_reduce_alike_in_any_precision(run_ranks, compute: str, sync: str) -> None:
    """In bf16 too a rank's branch must not be added to another rank's other branch."""
    changes: dict[str, Any] = {
        "precision": {"compute": compute},
        "data": {"dtype": "float32"},
        "train": {"sync": sync},
    }
    table = table_of("Branches", batch={"global_batch_size": 4, "microbatch_size": 1}, **changes)
    (single,), two = run_ranks(1, train, table), run_ranks(2, train, table)
    for record in two:
        assert [list(g) for g in record.gradients] == [list(g) for g in single.gradients]
        far = largest_distances(record, single)
        # The same microbatch gradients, summed in fp32 in another order (6e-8 a sum); Adam divides by their size.
        assert far["gradient"] < 1e-6 and far["loss"] < 1e-6 and far["weight"] < 1e-4, far
    assert all(torch.equal(two[0].weights[n], t) for n, t in two[1].weights.items())


def idle(world: Any, table: dict[str, Any]) -> list[list[str]]:
    trainer = Trainer(from_table(table), world)
    stream = trainer.stream(0, table["train"]["steps"])
    names = []
    for _ in range(table["train"]["steps"]):
        trainer.stepper.step(stream)
        names.append(trainer.stepper.idle)
    return names


def test_b098_trainable_parameters_without_a_gradient_are_named_on_each_rank(run_ranks) -> None:
    found = run_ranks(2, idle, table_of("Branches", 2, batch={"global_batch_size": 12, "microbatch_size": 3}))
    assert found == [[["never.bias", "never.weight"]] * 2] * 2  # the frozen layer is none of them


def test_b098_a_run_says_which_parameters_get_no_gradient(run_ranks) -> None:
    table = table_of("Branches", 2, batch={"global_batch_size": 12, "microbatch_size": 3})
    (_, said, _), (_, other, _) = run_ranks(2, whole_run, table)
    names = "never.bias, never.weight"
    assert said == f"warning: 2 trainable parameters got no gradient in the first step: {names}\n" and other == ""
    assert run_ranks(1, whole_run, small_table(1))[0][1] == ""


class Methods(nn.Module):
    """No forward: what a loss function uses are methods, parts and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale, self.head = Net(), nn.Parameter(torch.ones(())), nn.Linear(CLASSES, CLASSES)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale


def by_methods(model: Methods, batch: Batch) -> Any:
    once, twice = model.logits(batch["x"]), model.head(model.logits(batch["x"].flip(0)))
    total, count = cross_entropy(once + twice.flip(0), batch["labels"])
    return total + model.scale.square() * len(once), count


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_may_call_the_model_twice_its_methods_parts_and_parameters(run_ranks, ranks: int) -> None:
    section, make = optimizer("adamw")
    table = table_of("Methods", 4, loss={"build": "test_own_models:by_methods"}) | {"optimizer": section}
    records = run_ranks(ranks, train, table)
    one = by_hand(table, joined_ids(records), make)
    for record in records:
        far = largest_distances(record, one)
        assert all(x <= BOUND for x in far.values()), far


def test_methods_and_parts_compute_in_bf16_too(run_ranks) -> None:
    changes: dict[str, Any] = {"precision": {"compute": "bf16"}, "data": {"dtype": "bfloat16"}}
    table = table_of("Methods", 4, loss={"build": "test_own_models:by_methods"}, **changes)
    (single,), two = run_ranks(1, train, table), run_ranks(2, train, table)
    assert largest_distances(two[1], single)["gradient"] < 1e-6  # as above
    assert all(t.dtype == torch.float32 for t in single.weights.values())


class Tied(nn.Module):
    """One weight under two names, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.first.weight
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.again(torch.tanh(self.first(x))))


@pytest.mark.parametrize("compute", ["fp64", "bf16"])
def test_a_tied_weight_gets_both_gradients_once_and_stays_tied(run_ranks, compute: str) -> None:
    changes: dict[str, Any] = {"precision": {"compute": compute}}
    section, make = optimizer("adamw")
    table = table_of("Tied", 4, **changes) | {"optimizer": section}
    for ranks in (1, 2):
        records = run_ranks(ranks, train, table)
        assert "again.weight" in records[0].weights and "first.weight" not in records[0].weights
        one = by_hand(table, joined_ids(records), make)
        one.weights.pop("first.weight")
        for gradients in one.gradients:
            gradients["again.weight"] = gradients.pop("first.weight")
        far = largest_distances(records[0], one)
        # bf16 has 3 digits; AdamW moves each weight by at most lr = 0.01 a step, 4 steps, and weights are near 0.5
        assert far["loss"] < (BOUND if compute == "fp64" else 1e-2) and far["weight"] < (
            BOUND if compute == "fp64" else 0.1
        )


def wrapped(kind: str) -> nn.Module:
    if kind == "DataParallel":
        return nn.DataParallel(Net())
    if kind == "DistributedDataParallel":
        return DistributedDataParallel(Net())
    if kind == "FullyShardedDataParallel":
        return FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    return fully_shard(Net(), mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))


def refusal(world: Any, kind: str, inside: bool) -> str:
    def build() -> nn.Module:
        return nn.Sequential(wrapped(kind)) if inside else wrapped(kind)

    recipe = from_table(small_table(1, precision={"compute": "fp32"}))
    with pytest.raises(SpecError) as caught:
        Trainer(recipe, world, Parts(model=build))
    return str(caught.value)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", ["DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"])
def test_b003_what_something_else_has_spread_is_refused(run_ranks, kind: str, inside: bool) -> None:
    for text in run_ranks(2, refusal, kind, inside):
        assert (
            text == f"the model: is wrapped by {kind} already. Give the bare module: meshwright spreads it by [layout]."
        )


def detached(model: nn.Module, batch: Batch) -> Any:
    total, count = loss(model, batch)
    return total.detach(), count


def test_a_loss_that_does_not_depend_on_parameters_is_refused(run_ranks) -> None:
    with pytest.raises(SpecError, match=r"returned a sum that does not depend on the model's parameters.*undetached"):
        run_ranks(1, train, small_table(1, loss={"build": "test_own_models:detached"}))


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def test_a_model_with_nothing_to_train_is_refused(run_ranks) -> None:
    with pytest.raises(SpecError, match=r"has no trainable parameter \(4 in all\)"):
        run_ranks(2, train, table_of("Frozen"))
