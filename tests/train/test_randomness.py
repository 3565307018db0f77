"""What a model and a loss draw depends on (seed, step, microbatch) alone: the same on any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from meshwright.errors import RankDisagreement
from train.parity import largest_distances, train
from train.small import Net, cross_entropy, small_table, whole_run

BOUND = 1e-11
"""fp64 sums in another order differ by 1e-16 of themselves; a few steps let that grow."""


class Noisy(nn.Module):
    """Dropout as a module and as a function, and noise from each of the global generators."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.net = nn.Dropout(0.3), Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = 0.1 * (random.random() + float(np.random.rand()) + float(torch.rand(())))
        return self.drop(self.net(nn.functional.dropout(x + noise, 0.2, self.training)))


def mixed_up(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    """Mixup, as it is mostly written: its share drawn by numpy, its partners by torch."""
    share, other = np.random.beta(0.4, 0.4), torch.randperm(len(batch["x"]))
    logits = model(share * batch["x"] + (1 - share) * batch["x"][other])
    (first, count), (second, _) = (cross_entropy(logits, batch["labels"][rows]) for rows in (slice(None), other))
    return share * first + (1 - share) * second, count


def table_of(**changes: Any) -> dict[str, Any]:
    model, loss = {"build": "test_randomness:Noisy"}, {"build": "test_randomness:mixed_up"}
    return small_table(4, model=model, loss=loss, **changes)


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_models_and_losses_that_draw_train_the_same_on_any_number_of_ranks(run_ranks, ranks: int) -> None:
    (single,) = run_ranks(1, train, table_of())
    for record in run_ranks(ranks, train, table_of()):
        far = largest_distances(record, single)
        assert all(x <= BOUND for x in far.values()), far


def test_loader_workers_change_no_draw(run_ranks) -> None:
    alone, beside = (run_ranks(2, train, table_of(data={"workers": workers}))[0] for workers in (0, 2))
    assert beside.losses == alone.losses
    assert all(torch.equal(beside.weights[n], t) for n, t in alone.weights.items())


def test_another_seed_draws_otherwise_and_the_same_seed_the_same(run_ranks) -> None:
    once, again, other = (run_ranks(1, train, table_of(train={"seed": seed}))[0] for seed in (5, 5, 6))
    assert once.losses == again.losses and set(once.losses).isdisjoint(other.losses)


class Langevin(torch.optim.Optimizer):
    """Descent with noise."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            noise = torch.randn_like(parameter) + random.random() + float(np.random.rand())
            parameter.sub_(self.param_groups[0]["lr"] * (parameter.grad + 0.1 * noise))


def test_an_optimizer_that_draws_noise_keeps_the_ranks_equal(run_ranks) -> None:
    table = table_of() | {"optimizer": {"build": "test_randomness:Langevin", "lr": 0.1}}
    (single,), two = run_ranks(1, train, table), run_ranks(2, train, table)
    assert all(torch.equal(two[0].weights[n], t) for n, t in two[1].weights.items())
    assert all(x <= BOUND for x in largest_distances(two[0], single).values())


class Apart(Langevin):
    """Not even the same seed helps."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["params"][0].data += dist.get_rank()


def test_weights_that_have_come_apart_are_found_at_the_end_of_a_run_without_a_folder(run_ranks) -> None:
    table = table_of() | {"optimizer": {"build": "test_randomness:Apart", "lr": 0.1}}
    with pytest.raises(RankDisagreement, match=r"weights at step 4: differ between ranks: net\.first\.bias"):
        run_ranks(2, whole_run, table)


def frozen_draws(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    """The loss is what was drawn, so that the losses of a run are its draws."""
    drawn = random.random() + float(np.random.rand()) * 10 + float(torch.rand(())) * 100
    return 0.0 * model(batch["x"]).sum() + drawn, 1


def test_every_microbatch_of_every_step_draws_its_own(run_ranks) -> None:
    table = table_of(batch={"global_batch_size": 4, "microbatch_size": 4})
    table["loss"] = {"build": "test_randomness:frozen_draws"}
    losses = run_ranks(1, train, table)[0].losses
    assert len(set(losses)) == 4
    assert run_ranks(1, train, table)[0].losses == losses
