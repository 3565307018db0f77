"""The batch identity against counting, and the learning rate that follows the batch."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import BatchError
from meshwright.spec.batch import (
    BatchPlan,
    default_microbatch_size,
    lr_factor,
    microbatches_of_rank,
    plan_batch,
)
from meshwright.spec.sections import BatchSection, OptimizerSection


@given(st.integers(1, 60), st.integers(1, 10), st.integers(1, 10))
def test_identity_against_dealing_samples_out(size: int, micro: int, ranks: int) -> None:
    samples = list(range(size))
    grid = [samples[start : start + micro] for start in range(0, size, micro)]
    whole = size % micro == 0 and len(grid) % ranks == 0
    if not whole:
        with pytest.raises(BatchError):
            BatchPlan(size, micro, ranks)
        return
    plan = BatchPlan(size, micro, ranks)
    dealt = [[grid[i] for i in microbatches_of_rank(plan.total_microbatches, ranks, rank)] for rank in range(ranks)]
    assert {len(blocks) for blocks in dealt} == {plan.num_microbatches} == {plan.grad_accum_steps}
    assert [sample for blocks in dealt for block in blocks for sample in block] == samples


@given(st.integers(1, 60), st.integers(1, 10), st.integers(1, 10))
def test_every_nearest_solution_works(size: int, micro: int, ranks: int) -> None:
    try:
        BatchPlan(size, micro, ranks)
    except BatchError as error:
        hints = error.nearest.removeprefix("Nearest that work: ").rstrip(".").split("; ")
        numbers = [(hint, int(word)) for hint in hints for word in hint.split() if word.isdecimal()]
        assert numbers
        for hint, number in numbers:
            if hint.startswith("microbatch_size"):
                BatchPlan(size, number, ranks)
            elif hint.endswith("ranks"):
                BatchPlan(size, micro, number)
            else:
                BatchPlan(number, micro, ranks)


def test_twelve_by_two_on_four_ranks() -> None:
    with pytest.raises(BatchError) as caught:
        BatchPlan(12, 2, 4)
    message = str(caught.value)
    assert "12 / (4 data-parallel ranks x microbatch_size 2) = 1.5" in message
    assert "microbatch_size 1 or 3; 3 or 6 ranks; global_batch_size 8 or 16" in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-4, 2, 1)])
def test_numbers_below_one(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(BatchError, match="at least 1"):
        BatchPlan(*sizes)


@pytest.mark.parametrize(
    ("size", "ranks", "expected"), [(16, 1, 8), (16, 2, 8), (16, 4, 4), (14, 1, 7), (22, 1, 2), (13, 1, 1), (9, 3, 3)]
)
def test_default_microbatch(size: int, ranks: int, expected: int) -> None:
    assert default_microbatch_size(size, ranks) == expected
    assert plan_batch(BatchSection(global_batch_size=size), ranks) == BatchPlan(size, expected, ranks)


def test_default_microbatch_needs_ranks_that_divide() -> None:
    with pytest.raises(BatchError, match="2 or 4 ranks"):
        default_microbatch_size(16, 3)


def test_a_given_microbatch_is_kept() -> None:
    section = BatchSection(global_batch_size=16, microbatch_size=2)
    assert plan_batch(section, 4) == BatchPlan(16, 2, 4)
    with pytest.raises(BatchError):
        plan_batch(section, 3)


@given(st.integers(0, 50), st.integers(1, 12))
def test_blocks_partition_the_microbatches(total: int, ranks: int) -> None:
    blocks = [microbatches_of_rank(total, ranks, rank) for rank in range(ranks)]
    sizes = [len(block) for block in blocks]
    assert [index for block in blocks for index in block] == list(range(total))
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def scaled(rule: str, size: int, tuned: int | None) -> tuple[float, str, str]:
    section = OptimizerSection(lr=1e-3, lr_scaling=rule)
    found = lr_factor(section, BatchSection(global_batch_size=size, tuned_global_batch_size=tuned))
    return found.factor, found.line, found.source


def test_linear_scaling_shows_both_batches_both_rates_and_goyal() -> None:
    factor, line, source = scaled("linear", 64, 16)
    assert factor == 4.0
    assert all(part in line for part in ("0.001 -> 0.004", "batch 16", "has 64", "1706.02677"))
    assert "Goyal" in source and "2.1" in source and "\n" not in line


def test_sqrt_scaling_names_krizhevsky_and_malladi() -> None:
    factor, line, source = scaled("sqrt", 64, 16)
    assert factor == 2.0
    assert "0.001 -> 0.002" in line
    assert "1404.5997" in source and "2205.10330" in source


def test_a_smaller_batch_scales_down() -> None:
    assert scaled("linear", 4, 16)[0] == 0.25
    assert scaled("sqrt", 4, 16)[0] == 0.5


def test_without_a_rule_the_rate_stays_and_the_line_says_so() -> None:
    factor, line, source = scaled("none", 64, 16)
    assert (factor, source) == (1.0, "")
    assert all(part in line for part in ("0.001 stays", "batch 16", "64", "linear would give 0.004", "sqrt 0.002"))


def test_nothing_to_scale() -> None:
    assert scaled("none", 64, None) == (1.0, "", "")
    factor, line, _ = scaled("sqrt", 16, 16)
    assert factor == 1.0 and "stays" in line and "16" in line
