"""Calls of units: what two ranks must have in common, and what is said where they have not."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from meshwright.errors import RankDisagreement, SpecError
from meshwright.parallel.calls import Calls, never_a_view


class Rank:
    """Units a, b, c of one rank, and where it said that it was."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.calls = Calls(self.told.append)
        self.units = {name: nn.Linear(2, 2) for name in "abc"}
        for name, unit in self.units.items():
            self.calls.watch(unit, name)

    def call(self, names: str) -> None:
        """Call units in this order; a capital is the end of its unit's backward pass."""
        for name in names:
            if name.isupper():
                self.calls.ended(name.lower())
            else:
                self.units[name](torch.ones(2))

    def numbers(self, names: str) -> list[float]:
        self.call(names)
        return self.calls.numbers()


def together(*ranks: list[float]) -> list[float]:
    return [sum(column) for column in zip(*ranks, strict=True)]


@pytest.mark.parametrize("names", ["", "a", "abc", "cabbac", "abcCBA"])
def test_ranks_that_call_alike_go_on(names: str) -> None:
    for ranks in (1, 2, 3, 64):
        total, squares = summed = together(*[Rank().numbers(names) for _ in range(ranks)])
        assert total * total == ranks * squares
        Rank().calls.require_same(summed, ranks)


@pytest.mark.parametrize(
    ("one", "other"),
    [("abc", "bac"), ("abc", "abb"), ("ab", "abc"), ("abc", "abccc"), ("", "a"), ("aA", "aa"), ("abBA", "abAB")],
)
def test_ranks_that_call_otherwise_are_refused_whoever_they_are(one: str, other: str) -> None:
    """Another order, another unit, more often, ends in another order."""
    strange = Rank().numbers(other)
    for ranks in (2, 3, 64):
        for place in (0, ranks - 1):
            everyone = [Rank().numbers(one) for _ in range(ranks)]
            everyone[place] = strange
            with pytest.raises(RankDisagreement, match=r"the units of ZeRO: were called in another order, or another"):
                Rank().calls.require_same(together(*everyone), ranks)


@given(st.lists(st.integers(0, (1 << 14) - 1), min_size=1, max_size=40), st.integers(0, (1 << 14) - 1))
def test_only_equal_numbers_pass_and_equal_ones_always_do(numbers: list[int], one: int) -> None:
    def passes(shorts: list[int]) -> bool:
        try:
            Rank().calls.require_same([float(sum(shorts)), float(sum(x * x for x in shorts))], len(shorts))
        except RankDisagreement:
            return False
        return True

    assert passes(numbers) == (len(set(numbers)) == 1)
    assert passes([one] * 4096)
    assert not passes([one] * 4095 + [one ^ 1])


def test_a_rank_sends_a_whole_number_and_its_square() -> None:
    short, square = Rank().numbers("abc")
    assert short == int(short) < 1 << 14 and square == short * short


def test_a_new_step_forgets_the_calls_of_the_one_before() -> None:
    rank = Rank()
    before = rank.numbers("abc")
    assert rank.numbers("abc") != before  # it goes on within a step
    rank.calls.begin()
    assert rank.numbers("abc") == before


def test_units_that_a_microbatch_did_not_call_are_named() -> None:
    rank = Rank()
    rank.call("bb")
    with pytest.raises(SpecError, match=r"2 of 3 units of ZeRO \(a, c\): were not called in a microbatch"):
        rank.calls.require_all()


def test_each_microbatch_must_call_all_units_anew() -> None:
    rank = Rank()
    rank.call("cba")
    rank.calls.require_all()
    rank.call("ab")
    with pytest.raises(SpecError, match=r"1 of 3 units of ZeRO \(c\)"):
        rank.calls.require_all()
    rank.calls.begin()
    with pytest.raises(SpecError, match=r"3 of 3 units of ZeRO \(a, b, c\)"):
        rank.calls.require_all()


def test_where_a_rank_is_is_told_at_each_call_and_after_the_last() -> None:
    rank = Rank()
    rank.call("acb")
    rank.calls.require_all()
    assert rank.told == ["a", "c", "b", "after 3 calls"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_backward_pass_recomputes_is_no_call(reentrant: bool) -> None:
    """Its order is the backward's; what a reentrant checkpoint called without gradients counts."""
    plain, recomputed = Rank(), Rank()
    x = torch.ones(2, requires_grad=True)
    plain.units["b"](plain.units["a"](x)).sum().backward()
    a, b = recomputed.units["a"], recomputed.units["b"]
    checkpoint(b, checkpoint(a, x, use_reentrant=reentrant), use_reentrant=reentrant).sum().backward()
    assert plain.calls.numbers() == recomputed.calls.numbers()
    assert plain.told == recomputed.told == ["a", "b"]
    recomputed.call("c")
    recomputed.calls.require_all()


class Returns(nn.Module):
    """Returns what `make` makes of its input."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor):
        return self.make(x * 2)


def test_a_unit_returns_tensors_that_are_no_views_in_what_it_returned_them_in() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    cases = {
        "a view": lambda y: y[0],
        "tuple": lambda y: (y.view(6), 3, None),
        "list": lambda y: [y.t(), y],
        "no view": lambda y: y,
        "a dictionary": lambda y: {"out": y},
    }
    for name, make in cases.items():
        unit = Returns(make)
        never_a_view(unit)
        out = unit(x)
        assert type(out) is type(make(x)), name
        tensors = [out] if isinstance(out, torch.Tensor) else out.values() if isinstance(out, dict) else out
        assert not any(t._is_view() for t in tensors if isinstance(t, torch.Tensor)), name
        wanted = make(x * 2)
        for ours, theirs in zip(out if isinstance(out, tuple | list) else [], wanted, strict=False):
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours is theirs or ours == theirs
