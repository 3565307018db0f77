"""The cut of layers into stages against all cuts there are, and which rank has which stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import SpecError
from meshwright.spec.stage_cut import cut_stages, rank_of, stages_of, weigh

COSTS = st.one_of(st.integers(0, 5).map(float), st.sampled_from([0.1, 0.3, 1 / 3, 1e9, 1e9 + 1]))


def counts_of(spans: Sequence[range]) -> list[int]:
    return [len(span) for span in spans]


def best_of_all(weights: list[float], begin: float, end: float, num_stages: int) -> list[int]:
    """Every cut, and the least: largest cost, then squares, then layers from the first stage on."""

    def judged(stops: tuple[int, ...]) -> tuple[float, float, list[int]]:
        costs = [sum(weights[a:b]) for a, b in pairwise(stops)]
        costs[0] += begin
        costs[-1] += end
        return max(costs), sum(cost * cost for cost in costs), [b - a for a, b in pairwise(stops)]

    n = len(weights)
    return min(judged((0, *cut, n)) for cut in combinations(range(1, n), num_stages - 1))[2]


@st.composite
def whole_cases(draw: st.DrawFn) -> tuple[list[float], float, float, int]:
    weights = [float(w) for w in draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))]
    if draw(st.booleans()):
        weights = [weights[0]] * len(weights)
    ends = st.integers(0, 12).map(float)
    return weights, draw(ends), draw(ends), draw(st.integers(1, len(weights)))


@settings(max_examples=400, deadline=None)
@given(whole_cases())
def test_no_cut_is_better_by_the_stated_order(case: tuple[list[float], float, float, int]) -> None:
    assert counts_of(cut_stages(*case)) == best_of_all(*case)


@settings(max_examples=200, deadline=None)
@given(st.lists(COSTS, min_size=1, max_size=40), COSTS, COSTS, st.data())
def test_every_layer_is_on_one_stage_in_order_and_no_stage_is_empty(weights, begin, end, data) -> None:
    num_stages = data.draw(st.integers(1, len(weights)))
    spans = cut_stages(weights, begin, end, num_stages)
    assert len(spans) == num_stages and all(spans)
    assert [layer for span in spans for layer in span] == list(range(len(weights)))


@pytest.mark.parametrize("scale", [0.1, 1 / 3, 7e9])
def test_only_ratios_matter_and_rounding_never_does(scale: float) -> None:
    for num_stages in range(1, 13):
        plain = cut_stages([1.0] * 12, 0.0, 2.0, num_stages)
        assert cut_stages([scale] * 12, 0.0, 2 * scale, num_stages) == plain


def test_llama_3_1_405b_is_cut_as_its_authors_cut_it() -> None:
    layer, head = 3_187_703_808, 128_256 * 16_384
    assert counts_of(weigh([layer] * 126, head, head, tied=False).cut(16)) == [7, *[8] * 14, 7]


def test_a_tied_head_weighs_as_much_as_one_of_its_own() -> None:
    layers, table = [7_087_872] * 12, 50_257 * 768
    assert weigh(layers, table, 0, tied=True).cut(2) == weigh(layers, table, table, tied=False).cut(2)
    assert counts_of(weigh(layers, table, 0, tied=True).cut(2)) == [9, 3]  # the head is 5.4 layers' worth


@pytest.mark.parametrize(("num_stages", "layers"), [(5, 4), (0, 4), (1, 0), (-1, 3)])
def test_other_numbers_of_stages_are_refused_with_the_legal_ones(num_stages: int, layers: int) -> None:
    with pytest.raises(SpecError, match=f"{num_stages} pipeline stages.*{layers} layers.*Nearest"):
        cut_stages([1.0] * layers, 0.0, 0.0, num_stages)


@pytest.mark.parametrize("pp", [1, 2, 3, 8])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved1f1b", 3), ("zbv", 2)])
def test_every_stage_is_on_one_rank(pp: int, schedule: str, chunks: int) -> None:
    mine = {rank: stages_of(rank, pp, chunks, schedule) for rank in range(pp)}
    assert sorted(stage for stages in mine.values() for stage in stages) == list(range(pp * chunks))
    assert all(rank_of(stage, pp, schedule) == rank for rank, stages in mine.items() for stage in stages)


def test_a_v_has_both_ends_on_the_first_rank() -> None:
    assert [stages_of(rank, 3, 2, "zbv") for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [stages_of(rank, 3, 2, "interleaved1f1b") for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    with pytest.raises(SpecError, match="zbv with 3 chunks"):
        stages_of(0, 2, 3, "zbv")
