"""A step equals what one would write by hand for one process and one big batch: sums, counts, clipping, rates, keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn as nn

from train.parity import MODELS, SEQ_LEN, VOCAB, Record, joined_ids, largest_distances, recipe_table, train
from train.small import Points, by_hand, cross_entropy, small_table, trained

BOUND = 1e-11
"""fp64 sums in another order differ by 1e-16 of themselves; a dozen steps let that grow."""


def agree(
    run_ranks: Any, table: Mapping[str, Any], hand: Any, ranks: tuple[int, ...] = (1, 2, 3), **more: Any
) -> Record:
    """All numbers of ranks against each step's samples as one big batch."""
    for n in ranks:
        records = run_ranks(n, train, table)
        one = by_hand(table, joined_ids(records), hand, **more)
        for record in records:
            assert record.norms == records[0].norms and record.losses == records[0].losses
            far = largest_distances(record, one)
            assert all(x <= BOUND for x in far.values()), f"{n} ranks: {far}"
            assert record.rates == pytest.approx(one.rates, rel=1e-12)
    return one


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


def test_b001_b006_ragged_labels_count_alike_in_every_cut(run_ranks) -> None:
    """Microbatches here hold from 2 to 14 labels: a mean of their means would be far off."""
    one = agree(run_ranks, small_table(5), adamw)
    assert max(one.norms) > 0.3 > min(one.norms)  # the clipping acted, and not always


def test_b006_one_rank_with_seven_labels_and_one_with_one(run_ranks) -> None:
    table = small_table(3, batch={"global_batch_size": 2, "microbatch_size": 1}, data={"shuffle": False})
    labels = [int((Points()[i]["labels"] >= 0).sum()) for i in range(6)]
    assert 7 in labels and 1 in labels
    agree(run_ranks, table, adamw, (1, 2))


@pytest.mark.parametrize("limit", [1e-3, 0.5, 1e6])
def test_clipping_is_that_of_torch_on_the_whole_gradient(run_ranks, limit: float) -> None:
    table = small_table(3, optimizer={"max_grad_norm": limit})
    agree(run_ranks, table, adamw, (2,))


def test_b021_rates_follow_optimizer_steps_whatever_is_accumulated(run_ranks) -> None:
    schedule = {"name": "linear", "warmup_steps": 0}
    table = small_table(10, schedule=schedule, batch={"global_batch_size": 8, "microbatch_size": 1})
    one = agree(run_ranks, table, adamw, (1, 2))
    assert one.rates == pytest.approx([0.01 * (1 - k / 10) for k in range(10)])
    # The rate after 5 of the 10 updates is half the peak, and a rate of 0 would follow the tenth.
    assert one.rates[5] == 0.005


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("size", [101, 97, 33])
def test_the_last_short_step_of_an_epoch_weighs_each_label_as_the_others(run_ranks, size: int) -> None:
    """101 samples in steps of 32: 32, 32, 32, 5. On 3 ranks 5 samples leave a rank without rows (48 for 32)."""
    for n, batch, micro in ((1, 32, 4), (2, 32, 4), (3, 48, 4)):
        table = small_table(
            5,
            data={"last_batch": "keep", "arguments": {}, "size": size},
            batch={"global_batch_size": batch, "microbatch_size": micro},
            optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "max_grad_norm": 0.2},
        )
        table["optimizer"].pop("weight_decay")
        table["data"].pop("arguments")
        one = agree(run_ranks, table, momentum, (n,))
        per_epoch = -(-size // batch)
        assert sorted(i for ids in one.ids[:per_epoch] for i in ids) == list(range(size))
        assert len(one.ids[per_epoch - 1]) == (size - 1) % batch + 1


@pytest.mark.parametrize("model", ["gpt2", pytest.param("llama", marks=pytest.mark.matrix)])
def test_101_rows_of_tokens_are_all_used_once_and_equal_on_1_2_and_3_ranks(run_ranks, model: str) -> None:
    """Peers 3.3, with stand-ins: the fourth step has 5 rows in 3 microbatches."""
    changes: dict[str, Any] = {
        "data": {"build": "test_by_hand:Rows101", "last_batch": "keep"},
        "batch": {"global_batch_size": 36, "microbatch_size": 2},
    }
    table = recipe_table(model, "fp64", "adamw", steps=4, schedule={"warmup_steps": 1}, **changes)
    (single,) = run_ranks(1, train, table)
    assert [len(ids) for ids in single.ids] == [36, 36, 29, 36]
    assert sorted(i for ids in single.ids[:3] for i in ids) == list(range(101))
    for n in (2, 3):
        records = run_ranks(n, train, table)
        assert joined_ids(records) == single.ids
        far = [largest_distances(record, single) for record in records]
        assert all(x <= BOUND for one in far for x in one.values()), far


class Rows101:
    def __len__(self) -> int:
        return 101

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCAB, (SEQ_LEN + 1,), generator=torch.Generator().manual_seed(i))
        labels = tokens[1:].clone()
        labels[1 + i % SEQ_LEN :] = -100
        return {"tokens": tokens[:-1], "labels": labels}


@pytest.mark.parametrize("ranks", [1, 2])
def test_when_gradients_are_reduced_changes_nothing(run_ranks, ranks: int) -> None:
    last = run_ranks(ranks, train, small_table(4))[0]
    every = run_ranks(ranks, train, small_table(4, train={"sync": "every"}))[0]
    assert all(x <= BOUND for x in largest_distances(every, last).values())
    if ranks == 1:
        assert every.losses == last.losses


@pytest.mark.parametrize("model", MODELS)
def test_recompute_changes_no_bit(run_ranks, model: str) -> None:
    """With dropout, on 2 ranks that accumulate."""
    modes = [recipe_table(model, "fp32", "sgd", steps=5, train={"recompute": m}) for m in ("none", "selective", "full")]
    none, *others = run_ranks(2, trained, modes)[0]
    for other in others:
        assert other.losses == none.losses and other.norms == none.norms
        assert all(torch.equal(other.weights[n], t) for n, t in none.weights.items())


class Unlabelled(Points):
    """No labels at all in samples 4 to 7 (a step, without shuffling), and in each even one."""

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(i)
        if 4 <= i < 8 or i % 2 == 0:
            sample["labels"][:] = -100
        return sample


def mean_or_nothing(result: Any) -> torch.Tensor:
    total, count = result
    return total / count if count else total


def test_microbatches_and_steps_without_labels_count_for_nothing(run_ranks) -> None:
    table = small_table(
        4,
        data={"build": "test_by_hand:Unlabelled", "shuffle": False},
        batch={"global_batch_size": 4, "microbatch_size": 1},
    )
    one = agree(run_ranks, table, adamw, (1, 2), divide=mean_or_nothing)
    assert one.losses[1] == 0.0 and one.norms[1] == 0.0 and min(one.losses[0], one.losses[2]) > 0.0


def weighted(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sample weighs 0.01: the counts of a whole step stay below 1."""
    total, count = cross_entropy(model(batch["x"]), batch["labels"])
    return total * 0.01, count.double() * 0.01


def test_weights_of_samples_may_add_up_to_less_than_one(run_ranks) -> None:
    table = small_table(3, loss={"build": "test_by_hand:weighted"})
    agree(run_ranks, table, adamw, (1, 2))
    plain, scaled = (run_ranks(1, train, t)[0].losses for t in (small_table(3), table))
    assert scaled == pytest.approx(plain, rel=1e-12)
