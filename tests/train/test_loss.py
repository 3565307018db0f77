"""What a loss function may return, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from meshwright.errors import SpecError
from meshwright.train.loss import divisor, pairs_of, token_cross_entropy
from train.small import IGNORED

WEIGHT = torch.tensor(2.0, requires_grad=True)
BATCH = {"x": torch.zeros(3, 2), "labels": torch.tensor([[1, 2], [3, IGNORED], [IGNORED, IGNORED]])}


def pairs(result: Any, batch: Any = BATCH, warnings: list[str] | None = None) -> list[tuple[float, float]]:
    told = [] if warnings is None else warnings
    return [(float(pair.total.detach()), float(pair.count)) for pair in pairs_of(result, batch, told.append)]


def test_sums_and_counts_are_taken_as_they_are() -> None:
    assert pairs((WEIGHT, 3)) == [(2.0, 3.0)]
    assert pairs((WEIGHT, torch.tensor(3))) == [(2.0, 3.0)]
    assert pairs((WEIGHT.reshape(1), torch.tensor([3.0]))) == [(2.0, 3.0)]
    assert pairs([(WEIGHT, 3), (WEIGHT * 2, 0.5)]) == [(2.0, 3.0), (4.0, 0.5)]
    assert pairs(((WEIGHT, 3), [WEIGHT, 1])) == [(2.0, 3.0), (2.0, 1.0)]
    assert pairs([(WEIGHT, True)]) == [(2.0, 1.0)]


def test_b004_a_bare_mean_is_weighed_by_the_labels_that_count_and_the_user_is_told() -> None:
    told: list[str] = []
    assert pairs(WEIGHT, warnings=told) == [(6.0, 3.0)]
    assert len(told) == 1 and "mean over the labels that are not -100" in told[0] and "return (sum, count)" in told[0]


def test_b004_a_bare_mean_is_weighed_by_the_rows_where_no_labels_are_seen() -> None:
    for batch in (torch.zeros(5, 2), [torch.zeros(5), 1], {"n": 3, "x": {"y": torch.zeros(5)}}, (torch.zeros(5, 1),)):
        told: list[str] = []
        assert pairs(WEIGHT, batch, told) == [(10.0, 5.0)]
        assert "mean over the rows" in told[0]
    with pytest.raises(SpecError, match="does not say how many rows"):
        pairs(WEIGHT, {"a": "text", "b": torch.tensor(1.0)})


def test_a_mean_over_no_labels_counts_for_nothing() -> None:
    nothing = {"labels": torch.full((2, 2), IGNORED)}
    mean = F.cross_entropy(torch.zeros(4, 3, requires_grad=True) * WEIGHT, nothing["labels"].flatten())
    assert mean.isnan()
    (pair,) = pairs_of(mean, nothing, lambda text: None)
    assert float(pair.total.detach()) == 0.0 and float(pair.count) == 0.0
    assert torch.autograd.grad(pair.total, WEIGHT)[0] == 0.0


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (None, "returned a NoneType"),
        (1.5, "returned a float"),
        ("loss", "returned a str"),
        ([], "a list of nothing"),
        ({"loss": WEIGHT}, "returned a dict"),
        (torch.tensor(3), r"a int64 tensor of shape \(\)"),
        (torch.zeros(4), r"a float32 tensor of shape \(4,\)"),
        ((torch.zeros(4), 4), "a tuple of Tensor, int"),
        ((WEIGHT, torch.zeros(4)), "a tuple of Tensor with a gradient, Tensor"),
        ((3.0, 4), "a tuple of float, int"),
        ((torch.tensor(3), 4), "a tuple of Tensor, int"),
        ((WEIGHT, None), "a tuple of Tensor with a gradient, NoneType"),
        ((WEIGHT, 1, 2), "a tuple of Tensor with a gradient, int, int"),
        ([(WEIGHT, 1), WEIGHT], "a list of tuple, Tensor with a gradient"),
        # two losses are no sum and count: the second would divide the first, silently
        ((WEIGHT, WEIGHT * 3), "a tuple of Tensor with a gradient, Tensor with a gradient"),
    ],
)
def test_garbage_is_refused_with_what_it_was(result: Any, match: str) -> None:
    with pytest.raises(SpecError, match=match + r".*must return \(sum, count\)"):
        pairs(result)


def test_a_count_below_one_divides_too() -> None:
    assert [divisor(n) for n in (0.0, 0.25, 1.0, 7.0)] == [1.0, 0.25, 1.0, 7.0]


class Head(nn.Module):
    def __init__(self, dtype: torch.dtype, wrap: bool = False) -> None:
        super().__init__()
        self.weight, self.wrap = nn.Parameter(torch.randn(7, 5, dtype=dtype)), wrap

    def forward(self, tokens: torch.Tensor) -> Any:
        logits = self.weight[tokens]
        return type("Output", (), {"logits": logits})() if self.wrap else logits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_default_loss_is_summed_over_the_labels_in_fp32_or_wider(dtype: torch.dtype) -> None:
    tokens, labels = torch.randint(0, 7, (2, 3)), torch.tensor([[1, IGNORED, 2], [4, 0, IGNORED]])
    model = Head(dtype)
    total, count = token_cross_entropy(model, {"tokens": tokens, "labels": labels})
    logs = torch.log_softmax(model.weight.double(), -1)
    wanted = -sum(logs[t, x] for t, x in zip(tokens.flatten(), labels.flatten(), strict=True) if x != IGNORED)
    assert int(count) == 4
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # fp32 rounds each of the few terms by 6e-8 of itself
    assert abs(float(total.detach()) - float(wanted.detach())) < 1e-5 * float(wanted.detach())
    model.wrap = True
    assert token_cross_entropy(model, {"tokens": tokens, "labels": labels})[0] == total


@pytest.mark.parametrize(("batch", "match"), [({"x": 1, "y": 2}, "gives keys x, y"), ([1], "gives a list")])
def test_the_default_loss_says_what_batches_it_needs(batch: Any, match: str) -> None:
    with pytest.raises(SpecError, match=match + r".*loss.build"):
        token_cross_entropy(Head(torch.float32), batch)
