"""The grid of exact mode, against fractions: what is rounded to it, what its sums are, and when it follows."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import SpecError
from meshwright.parallel.grid import FIRST, LARGEST, MOST_MICROBATCHES, RESOLUTION, SIGNIFICAND, Grid, require_few

MICROBATCHES = st.one_of(st.integers(1, 64), st.integers(1, MOST_MICROBATCHES))
PEAKS = st.floats(1e-280, 1e280)
"""Far beyond what fp32 holds; nearer to the ends of fp64 a grid would need numbers that fp64 does not have."""


def grid_of(peak: float, num_microbatches: int = 8) -> Grid:
    grid = Grid(["a"], num_microbatches)
    grid.follow([peak])
    return grid


def most(grid: Grid, num_microbatches: int) -> float:
    """The largest magnitude that fits a grid: the last number below 2**room units."""
    room = min(SIGNIFICAND - math.ceil(math.log2(num_microbatches)), 51)
    return math.nextafter(math.ldexp(grid.unit(0), room), 0.0)


def rounded(grid: Grid, value: float) -> float:
    shift = grid.shift(0)
    return (value + shift) - shift


@given(MICROBATCHES, PEAKS, st.floats(-1.0, 1.0))
def test_what_fits_is_rounded_to_the_nearest_multiple_of_the_unit(n: int, peak: float, share: float) -> None:
    grid = grid_of(peak, n)
    unit = Fraction(grid.unit(0))
    for value in (peak, -peak, share * peak, share * most(grid, n), most(grid, n), -most(grid, n), 0.0):
        on_grid = Fraction(rounded(grid, value))
        assert (on_grid / unit).denominator == 1
        assert abs(on_grid - Fraction(value)) <= unit / 2


@given(MICROBATCHES, PEAKS)
def test_the_unit_is_so_far_below_the_largest_gradient_that_fp32_does_not_see_it(n: int, peak: float) -> None:
    grid = grid_of(peak, n)
    assert grid.unit(0) <= math.ldexp(peak, -RESOLUTION)


@given(st.integers(1, 40), PEAKS, st.lists(st.floats(-1.0, 1.0), min_size=40, max_size=40), st.randoms())
def test_sums_of_as_many_microbatches_are_exact_in_any_order(
    n: int, peak: float, shares: list[float], order: random.Random
) -> None:
    """The worst is among them: every microbatch as large as fits, all of one sign."""
    grid = grid_of(peak, n)
    for values in ([share * most(grid, n) for share in shares[:n]], [most(grid, n)] * n, [-most(grid, n)] * n):
        terms = [rounded(grid, value) for value in values]
        exact = sum(map(Fraction, terms), Fraction(0))
        for _ in range(3):
            order.shuffle(terms)
            total, cut = 0.0, n // 2
            for term in terms:
                total += term
            assert Fraction(total) == exact
            assert Fraction(sum(terms[:cut], 0.0) + sum(terms[cut:], 0.0)) == exact  # as two ranks sum them


def test_sums_of_the_most_microbatches_are_exact_too() -> None:
    grid = grid_of(1.0, MOST_MICROBATCHES)
    term, total = rounded(grid, most(grid, MOST_MICROBATCHES)), 0.0
    for _ in range(MOST_MICROBATCHES):
        total += term
    assert Fraction(total) == Fraction(term) * MOST_MICROBATCHES


def test_a_table_that_two_modules_share_halves_the_microbatches_that_a_step_may_have() -> None:
    assert require_few(MOST_MICROBATCHES // 2, 2) == require_few(MOST_MICROBATCHES, 1) == MOST_MICROBATCHES
    with pytest.raises(SpecError, match=r"40000 microbatches a step, and 2 modules .* 80000 .* at most 32768"):
        require_few(40000, 2)


PEAK_OR_NONE = st.one_of(st.just(-1.0), st.just(0.0), PEAKS)


@given(MICROBATCHES, st.lists(st.lists(PEAK_OR_NONE, min_size=3, max_size=3), min_size=1, max_size=5))
def test_a_second_attempt_always_fits(n: int, steps: list[list[float]]) -> None:
    grid = Grid(["a", "b", "c"], n)
    for peaks in steps:
        grid.follow(peaks)
        assert grid.outside(peaks) == []


@given(MICROBATCHES, PEAKS)
def test_parameters_that_never_had_a_gradient_are_outside_with_their_first(n: int, peak: float) -> None:
    grid = Grid(["a", "b"], n)
    assert (grid.outside([peak, peak]), grid.shift(0), grid.unit(0)) == ([0, 1], None, None)
    assert grid.outside([-1.0, 0.0]) == []  # none, and all zeros
    grid.follow([peak, -1.0])
    assert (grid.outside([peak, peak]), grid.outside([-1.0, 0.0])) == ([1], [])


@pytest.mark.parametrize(("n", "factor"), [(1, 500), (8, 500), (1024, 50), (MOST_MICROBATCHES, 2)])
def test_gradients_may_grow_and_shrink_from_step_to_step_as_the_module_says(n: int, factor: float) -> None:
    """A factor of 2**((21 - log2(n)) / 2), of which one bit may be lost where the maximum was near a power of two."""
    for peak in (1.0, 1.999):
        grid = grid_of(peak, n)
        assert grid.outside([peak * factor / 2]) == grid.outside([peak / (factor / 2)]) == []
        assert grid.outside([peak * factor * 16]) == grid.outside([peak / (factor * 16)]) == [0]


@given(MICROBATCHES, PEAKS, st.integers(-60, 60))
def test_what_fits_lies_between_its_two_limits(n: int, peak: float, bits: int) -> None:
    grid, other = grid_of(peak, n), math.ldexp(peak, bits)
    limits = math.ldexp(grid.unit(0), RESOLUTION), most(grid, n)
    assert (grid.outside([other]) == []) == (limits[0] <= other <= limits[1])


def test_why_a_step_is_computed_again_is_told_with_the_parameter_and_its_numbers() -> None:
    grid = Grid(["first.weight", "last.bias", "never"], 8)
    assert grid.told([1.0, 2.0, -1.0], [0, 1]) == FIRST
    grid.follow([1.0, -1.0, -1.0])
    new = "last.bias has a gradient for the first time, of at most 0.123"
    assert grid.told([1.0, 0.1234, -1.0], [1]) == new
    grid.follow([1.0, 1.0, -1.0])
    unit = f"{grid.unit(0):.3g}"  # 2**-40, below the power of two above 1
    small = grid.told([1e-9, 1e-9, -1.0], grid.outside([1e-9, 1e-9, -1.0]))
    assert small == f"the largest gradient of first.weight (and 1 more) is 1e-09, below 2**30 units of {unit}"
    large = grid.told([1.0, 1e9, -1.0], grid.outside([1.0, 1e9, -1.0]))
    assert large == f"the largest gradient of last.bias is 1e+09, above 2**50 units of {unit}"


@given(MICROBATCHES, st.lists(PEAK_OR_NONE, min_size=3, max_size=3))
def test_a_grid_that_was_saved_and_loaded_is_the_same(n: int, peaks: list[float]) -> None:
    names = ["a", "b", "c"]
    grid, again = Grid(names, n), Grid(names[::-1], n)
    grid.follow(peaks)
    assert grid.state().keys() == {name for name, peak in zip(names, peaks, strict=True) if peak > 0}
    again.follow([1.0] * 3)
    again.load({**grid.state(), "gone": 3})
    assert again.state() == grid.state()
    for number, name in enumerate(again.names):
        assert again.shift(number) == grid.shift(names.index(name))


@given(st.floats(5e-324, 1e-270))
def test_gradients_near_the_end_of_fp64_have_a_grid_too(peak: float) -> None:
    grid = Grid(["a"], 12)
    grid.follow([peak])
    assert not grid.outside([peak])
    shift, unit = grid.shift(0), grid.unit(0)
    assert shift is not None and unit is not None and unit > 0
    assert ((peak + shift) - shift) % unit == 0


def test_the_largest_gradients_that_are_not_taken_for_infinite_have_a_grid() -> None:
    grid = Grid(["a"], MOST_MICROBATCHES)
    grid.follow([LARGEST])
    shift = grid.shift(0)
    assert shift is not None and (LARGEST + shift) - shift == LARGEST
