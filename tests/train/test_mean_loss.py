"""A loss function that returns a bare mean: weighed by what can be counted, and the user is told once, by rank 0."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn as nn

from meshwright.errors import MeshwrightWarning
from meshwright.spec.load import from_table
from meshwright.train.evaluate import evaluate
from meshwright.train.trainer import Trainer
from train.parity import Record, joined_ids, largest_distances, train
from train.small import by_hand, loss, small_table, whole_run

BOUND = 1e-11
"""fp64 sums in another order differ by 1e-16 of themselves; a few steps let that grow."""

Batch = Mapping[str, torch.Tensor]


def mean(model: nn.Module, batch: Batch) -> torch.Tensor:
    total, count = loss(model, batch)
    return total / count


def mean_of_rows(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The same where the batch has no `labels`: a mean of the outputs over the rows."""
    return model(batch["x"]).square().mean()


class Rows:
    def __len__(self) -> int:
        return 101

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(7, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64)}


def table_of(loss: str, equal: bool = True, **changes: Any) -> dict[str, Any]:
    table = small_table(4, loss={"build": f"test_mean_loss:{loss}"}, **changes)
    table["data"] |= {"build": "test_mean_loss:Rows"} if loss == "mean_of_rows" else {"equal": equal}
    return table


def quietly(world: Any, table: dict[str, Any]) -> tuple[Record, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = train(world, table)
        return record, [str(w.message) for w in caught if issubclass(w.category, MeshwrightWarning)]


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


@pytest.mark.parametrize(("loss", "equal"), [("mean", True), ("mean", False), ("mean_of_rows", True)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_b004_microbatches_of_a_mean_weigh_what_they_hold(run_ranks, loss: str, equal: bool, ranks: int) -> None:
    """Also in the short last step, whose microbatches differ in rows: 101 samples, 4 steps of 32."""
    changes: dict[str, Any] = {"batch": {"global_batch_size": 32, "microbatch_size": 8}}
    table = table_of(loss, equal, **changes)
    table["data"]["last_batch"] = "keep"
    found = run_ranks(ranks, quietly, table)
    one = by_hand(table, joined_ids([record for record, _ in found]), adamw, divide=lambda result: result)
    assert [len(ids) for ids in one.ids] == [32, 32, 32, 5]
    for record, _ in found:
        far = largest_distances(record, one)
        assert all(x <= BOUND for x in far.values()), far


@pytest.mark.parametrize(("loss", "what"), [("mean", "labels that are not -100"), ("mean_of_rows", "rows")])
def test_b004_the_warning_comes_once_and_from_rank_0_alone(run_ranks, loss: str, what: str) -> None:
    (_, first), (_, second) = run_ranks(2, quietly, table_of(loss))
    assert len(first) == 1 and second == []
    assert f"mean over the {what} of a microbatch" in first[0] and "return (sum, count)" in first[0]


def test_b004_a_run_says_it_on_its_console(run_ranks) -> None:
    (_, first, _), (_, second, _) = run_ranks(2, whole_run, table_of("mean"))
    assert first.startswith("warning: the loss function returns one number.") and first.count("\n") == 1
    assert second == ""


def test_a_sum_with_its_count_warns_of_nothing(run_ranks) -> None:
    assert [told for _, told in run_ranks(2, quietly, small_table(2))] == [[], []]


def validated(world: Any, table: dict[str, Any]) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeshwrightWarning)
        trainer = Trainer(from_table(table), world)
        return list(evaluate(trainer.stepper, trainer.source, trainer.split))


def test_a_mean_is_weighed_in_validation_too(run_ranks) -> None:
    changes: dict[str, Any] = {"validation": {"fraction": 0.3}}
    sums = run_ranks(1, validated, small_table(1, **changes))[0]
    for found in run_ranks(2, validated, table_of("mean", False, **changes)):
        assert found == pytest.approx(sums, rel=1e-12)  # fp64
