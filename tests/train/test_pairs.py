"""A loss of several pairs: each sum is divided by its own count over the whole step, however the step is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn as nn

from meshwright.errors import SpecError
from train.parity import Record, joined_ids, largest_distances, recipe_table, train
from train.small import Net, by_hand, cross_entropy, small_table

BOUND = 1e-11
"""fp64 sums in another order differ by 1e-16 of themselves; a few steps let that grow."""

Batch = Mapping[str, torch.Tensor]


def with_aux(model: nn.Module, batch: Batch) -> list[tuple[torch.Tensor, Any]]:
    """Cross-entropy over the labels, and 0.01 of the mean square of the outputs over the samples."""
    logits = model(batch["x"])
    return [cross_entropy(logits, batch["labels"]), (0.01 * logits.square().mean((1, 2)).sum(), len(logits))]


class Counted:
    """The same with its counts known from the batch alone."""

    def __call__(self, model: nn.Module, batch: Batch) -> Any:
        return with_aux(model, batch)

    def counts(self, batch: Batch) -> list[Any]:
        return [(batch["labels"] != -100).sum(), len(batch["x"])]


counted = Counted()


class Lies(Counted):
    def counts(self, batch: Batch) -> list[Any]:
        return [batch["labels"].numel(), len(batch["x"])]


class TooFew(Counted):
    def counts(self, batch: Batch) -> list[Any]:
        return [len(batch["x"])]


class NoList(Counted):
    def counts(self, batch: Batch) -> Any:
        return len(batch["x"])


class Text(Counted):
    def counts(self, batch: Batch) -> Any:
        return ["many", "few"]


lies, too_few, no_list, text = Lies(), TooFew(), NoList(), Text()


def mean(result: Any) -> torch.Tensor:
    return sum(total / count for total, count in result)


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


def paired(loss: str, **changes: Any) -> dict[str, Any]:
    return small_table(3, loss={"build": f"test_pairs:{loss}"}, **changes)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("loss", ["with_aux", "counted"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_b005_an_auxiliary_mean_weighs_the_same_on_1_2_and_4_ranks(
    run_ranks, ranks: int, loss: str, micro: int
) -> None:
    """With microbatches of 1, ranks accumulate; of 3 on 4 ranks, each has one."""
    table = paired(loss, batch={"global_batch_size": 12, "microbatch_size": micro})
    records = run_ranks(ranks, train, table)
    one = by_hand(table, joined_ids(records), adamw, mean)
    for record in records:
        far = largest_distances(record, one)
        assert all(x <= BOUND for x in far.values()), far


def constant_aux(model: nn.Module, batch: Batch) -> list[tuple[torch.Tensor, Any]]:
    """The second pair's gradient alone: 0.01 in the direction of each last bias, whatever the samples."""
    logits = model(batch["x"])
    return [(0.0 * logits.sum(), len(logits)), (0.01 * len(logits) * model.last.bias.sum(), len(logits))]


def test_b005_the_gradient_of_a_constant_auxiliary_loss_does_not_grow_with_ranks(run_ranks) -> None:
    for ranks in (1, 2, 4):
        table = paired("constant_aux", batch={"global_batch_size": 12, "microbatch_size": 1})
        record = run_ranks(ranks, train, table)[0]
        for gradient in record.gradients:
            # fp64 rounding of a sum of 12 equal terms
            assert torch.allclose(
                gradient["last.bias"], torch.full((5,), 0.01, dtype=torch.float64), rtol=1e-14, atol=0
            )


@pytest.mark.parametrize("loss", ["with_aux", "counted"])
def test_pairs_in_bf16_are_counted_the_same_on_two_ranks(run_ranks, loss: str) -> None:
    changes: dict[str, Any] = {"precision": {"compute": "bf16"}, "data": {"dtype": "float32"}}
    table = paired(loss, batch={"global_batch_size": 12, "microbatch_size": 1}, **changes)
    (single,), (first, second) = run_ranks(1, train, table), run_ranks(2, train, table)
    fp64 = run_ranks(1, train, paired(loss, batch={"global_batch_size": 12, "microbatch_size": 1}))[0]
    assert first.losses == second.losses
    # Both sum the same bf16 microbatch gradients in fp32: 6e-8 a sum, of 12 terms.
    far = largest_distances(first, single)
    assert far["loss"] < 1e-6 and far["gradient"] < 1e-5, far
    # And bf16 itself, with 3 digits, is near the truth.
    assert largest_distances(single, fp64)["loss"] < 1e-2


class WithNorm(nn.Module):
    """Its batch norm must see each microbatch once, also where the pairs are counted first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(7), Net()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1.0  # another tensor under the same name
        return self.net(self.norm(x))


def test_counting_leaves_no_trace_in_buffers(run_ranks) -> None:
    def weights(loss: str) -> dict[str, torch.Tensor]:
        table = paired(loss, model={"build": "test_pairs:WithNorm"})
        record: Record = run_ranks(1, train, table)[0]
        return record.weights

    first, known = weights("with_aux"), weights("counted")
    assert first["norm.num_batches_tracked"] == first["seen"] == 3 * 6
    assert {name: float((first[name] - t).abs().max()) for name, t in known.items()} == dict.fromkeys(known, 0.0)


def dropped(model: nn.Module, batch: Batch) -> Any:
    dropout = nn.functional.dropout(model(batch["x"]), 0.5)
    return [cross_entropy(dropout, batch["labels"]), (dropout.square().sum(), len(dropout))]


class DroppedCounted(Counted):
    def __call__(self, model: nn.Module, batch: Batch) -> Any:
        return dropped(model, batch)


dropped_counted = DroppedCounted()


def test_counting_first_draws_the_same_dropout(run_ranks) -> None:
    for ranks in (1, 2):
        passed, known = (run_ranks(ranks, train, paired(f"{kind}"))[0] for kind in ("dropped", "dropped_counted"))
        assert passed.losses == known.losses
        assert all(torch.equal(passed.weights[n], t) for n, t in known.weights.items())


def tokens_with_aux(model: nn.Module, batch: Batch) -> Any:
    logits = model(batch["tokens"])
    return [cross_entropy(logits, batch["labels"]), (1e-3 * logits.square().sum(), logits.numel())]


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_counting_first_and_recompute_go_together_with_dropout(run_ranks, model: str) -> None:
    """The counting pass lies between the first forward pass and its backward, which computes the blocks again."""
    loss = {"build": "test_pairs:tokens_with_aux"}
    none, full = (
        run_ranks(2, train, recipe_table(model, "fp32", "sgd", steps=5, loss=loss, train={"recompute": mode}))[0]
        for mode in ("none", "full")
    )
    assert full.losses == none.losses and full.norms == none.norms
    assert all(torch.equal(full.weights[n], t) for n, t in none.weights.items())


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        ("lies", r"said 84 of pair 0 before the step, and \d+ came with its sums.*must count the same"),
        ("too_few", "returned 2 pairs, and its `counts` has 1 numbers"),
        ("no_list", "counts of the loss function: returned a int; it must return a list of numbers"),
        ("text", "counts of the loss function: returned a list; it must return a list of numbers"),
    ],
)
def test_counts_that_are_wrong_are_refused(run_ranks, loss: str, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        run_ranks(2, train, paired(loss))


def changing(model: nn.Module, batch: Batch) -> Any:
    pairs = with_aux(model, batch)
    return pairs if float(batch["x"][0, 0, 0]) > 0 else pairs[:1]


def negative(model: nn.Module, batch: Batch) -> Any:
    total, count = cross_entropy(model(batch["x"]), batch["labels"])
    return total, -count


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        ("changing", "returned 1 and 2 pairs in one step"),
        ("negative", r"counted -\d+ for pair 0 in one step; at least 0"),
    ],
)
def test_pairs_that_change_or_count_backwards_are_refused(run_ranks, loss: str, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        run_ranks(1, train, paired(loss))
