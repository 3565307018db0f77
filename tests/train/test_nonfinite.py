"""NaN and infinity: one decision on all ranks, the place named, nothing changed by a step that is not made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn as nn

from meshwright.errors import NonFiniteError
from meshwright.models.digest import state_items
from meshwright.spec.load import from_table
from meshwright.train.trainer import Trainer
from train.small import SLOTS, WIDTH, Net, Points, loss, small_table

BAD = 9
"""The poisoned sample. Without shuffling it is in step 1 (from 0) of steps of 8: microbatch 0 of 4."""

Batch = Mapping[str, torch.Tensor]


class Poisoned(Points):
    """Sample `bad` is NaN in an input, or asks the loss function for something else by its `deed`."""

    def __init__(self, bad: int = BAD, deed: int = 0, size: int = 101, dtype: str = "float64") -> None:
        super().__init__(size, dtype=dtype)
        self.bad, self.deed = bad, deed

    def __getitem__(self, i: int) -> dict[str, Any]:
        sample = super().__getitem__(i)
        if i == self.bad and not self.deed:
            sample["x"][0, 0] = float("nan")
        return sample | {"deed": self.deed if i == self.bad else 0}


def deeds(model: nn.Module, batch: Batch) -> Any:
    total, count = loss(model, batch)
    deed = int(batch["deed"].max())
    if deed == 1:  # a finite loss with an infinite gradient
        total = total + torch.sqrt(0.0 * model.last.bias.sum())
    if deed == 2:
        count = count * float("inf")
    return total, count


class Normed(nn.Module):
    """With running statistics, which a NaN would spoil for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(SLOTS * WIDTH), Net()
        self.last = self.net.last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x.flatten(1)).view_as(x))


def table_of(on: str, model: str = "train.small:Net", **data: Any) -> dict[str, Any]:
    return small_table(
        4,
        model={"build": model},
        data={"build": "test_nonfinite:Poisoned", "shuffle": False, **data},
        loss={"build": "test_nonfinite:deeds"},
        batch={"global_batch_size": 8, "microbatch_size": 2},
        train={"on_nonfinite": on},
    )


def run(world: Any, table: dict[str, Any]) -> dict[str, Any]:
    """Steps until the end or an error: what happened, and the state before and after."""
    trainer = Trainer(from_table(table), world)
    stream, results, states = trainer.stream(0, 4), [], []

    def state() -> dict[str, torch.Tensor]:
        return {n: t.detach().clone() for n, t in state_items(trainer.model)}

    def weights_are_as_before() -> bool:
        return all(torch.equal(p, states[-1][n]) for n, p in trainer.model.named_parameters())

    for _ in range(4):
        states.append(state())
        try:
            results.append(trainer.stepper.step(stream))
        except NonFiniteError as error:
            assert weights_are_as_before()
            return {"error": str(error), "losses": [r.loss for r in results]}
    return {"results": results, "state": state(), "states": states}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_nan_stops_all_ranks_with_step_rank_and_microbatch(run_ranks, ranks: int) -> None:
    found = run_ranks(ranks, run, table_of("stop"))
    assert len({tuple(sorted(one)) for one in found}) == 1
    for one in found:
        assert one["error"].startswith("step 2: the loss is not finite (rank 0, microbatch 0); loss nan")
        assert "No weight was changed by this step" in one["error"] and 'on_nonfinite = "skip"' in one["error"]
        assert len(one["losses"]) == 1


@pytest.mark.parametrize(("bad", "ranks", "where"), [(13, 2, "rank 1, microbatch 2"), (15, 4, "rank 3, microbatch 3")])
def test_the_rank_and_microbatch_named_are_those_of_the_sample(run_ranks, bad: int, ranks: int, where: str) -> None:
    for one in run_ranks(ranks, run, table_of("stop", bad=bad)):
        assert f"step 2: the loss is not finite ({where})" in one["error"]


def test_in_the_short_last_step_of_an_epoch_the_owner_is_another(run_ranks) -> None:
    """12 samples in steps of 8: the second has 2 microbatches, one for each rank, where a whole step has 4."""
    for one in run_ranks(2, run, table_of("stop", bad=10, size=12, last_batch="keep")):
        assert "step 2: the loss is not finite (rank 1, microbatch 1)" in one["error"]


@pytest.mark.parametrize("compute", ["fp64", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_infinite_gradient_of_a_finite_loss_is_traced_to_its_microbatch(run_ranks, ranks: int, compute: str) -> None:
    table = table_of("stop", bad=13, deed=1, dtype="float32") | {"precision": {"compute": compute}}
    for one in run_ranks(ranks, run, table):
        assert f"step 2: the gradient is not finite (rank {ranks - 1}, microbatch 2); loss 1." in one["error"]


@pytest.mark.parametrize(
    ("deed", "what"),
    [
        (2, "the loss is not finite (rank 0, microbatch 0)"),
        (0, "the sum of the losses is not finite (no microbatch"),
    ],
)
def test_counts_and_sums_that_overflow_are_found(run_ranks, deed: int, what: str) -> None:
    table = table_of("stop", deed=deed)
    if not deed:
        table["loss"] = {"build": "test_nonfinite:huge"}
    for one in run_ranks(2, run, table):
        assert what in one["error"]


def huge(model: nn.Module, batch: Batch) -> Any:
    """Finite by itself; four of them are not."""
    total, count = loss(model, batch)
    return total + 1e308, count


@pytest.mark.parametrize("deed", [0, 1])
@pytest.mark.parametrize("model", ["train.small:Net", "test_nonfinite:Normed"])
def test_a_skipped_step_changes_nothing_and_training_goes_on_alike_everywhere(run_ranks, model: str, deed: int) -> None:
    (single,) = run_ranks(1, run, table_of("skip", model, deed=deed))
    skipped = [bool(result.skipped) for result in single["results"]]
    assert skipped == [False, True, False, False]
    before, after = single["states"][1:3]
    assert all(torch.equal(t, after[n]) for n, t in before.items())  # batch statistics too
    assert all(t.isfinite().all() for t in single["state"].values())
    two = run_ranks(2, run, table_of("skip", model, deed=deed))
    for one in two:
        assert [r.skipped for r in one["results"]] == [r.skipped for r in two[0]["results"]]
        assert [bool(r.skipped) for r in one["results"]] == skipped
        for ours, theirs in zip(one["results"], single["results"], strict=True):
            if not theirs.skipped:
                assert ours.loss == pytest.approx(theirs.loss, rel=1e-11)  # fp64 sums in another order
                assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-10)
        for name, tensor in single["state"].items():
            if "running" not in name and "tracked" not in name:  # each rank has its own batch statistics
                assert torch.allclose(one["state"][name], tensor, rtol=0, atol=1e-11)


def test_the_rate_goes_on_past_a_skipped_step(run_ranks) -> None:
    table = table_of("skip") | {"schedule": {"name": "linear"}}
    (one,) = run_ranks(1, run, table)
    assert [r.lr for r in one["results"]] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
