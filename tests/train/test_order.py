"""The order of samples: a permutation for each epoch, cut into steps, equal to what brute force would do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import DataError
from meshwright.spec.batch import BatchPlan
from meshwright.train.loader import Cut
from meshwright.train.order import SampleOrder, Split, permute

QUICK = settings(max_examples=60, deadline=None)


@st.composite
def orders(draw: st.DrawFn) -> SampleOrder:
    size = draw(st.integers(1, 300))
    fraction = draw(st.sampled_from([0.0, 0.0, 0.1, 0.29, 0.5]))
    shuffle, keep = draw(st.booleans()), draw(st.booleans())
    split = Split(size, fraction, draw(st.integers(0, 5)), shuffle)
    batch = draw(st.integers(1, split.num_training))
    return SampleOrder(split, batch, draw(st.integers(0, 2**40)), shuffle, "keep" if keep else "drop")


@QUICK
@given(st.integers(1, 5000), st.text(max_size=8))
def test_permute_gives_every_index_once(size: int, key: str) -> None:
    got = permute(np.arange(size), size, key)
    assert sorted(got.tolist()) == list(range(size))
    assert permute(np.array([[size - 1], [0]]), size, key).tolist() == [[got[-1]], [got[0]]]


def test_permute_shuffles_well_at_every_size() -> None:
    # Of 200 keys each index should land anywhere: no place may hold the same index in more than a third of them.
    for size in (2, 3, 4, 5, 16, 17):
        rows = np.array([permute(np.arange(size), size, str(key)) for key in range(200)])
        most = max(np.bincount(rows[:, place]).max() for place in range(size))
        # A fair count is 200 / size; 6 standard deviations of the binomial are allowed over it.
        assert most < 200 / size + 6 * (200 / size * (1 - 1 / size)) ** 0.5


def test_huge_data_sets_cost_no_more() -> None:
    got = permute(np.array([0, 10**15]), 10**15 + 1, "big")
    assert len(set(got.tolist())) == 2 and got.min() >= 0 and got.max() <= 10**15


@QUICK
@given(orders())
def test_steps_are_the_epochs_permutation_cut_up(order: SampleOrder) -> None:
    per_epoch, size = order.steps_per_epoch, order.split.num_training
    training = set(order.split.training_ids(np.arange(size)).tolist())
    for epoch in range(2):
        steps = [order.samples_of(epoch * per_epoch + k).tolist() for k in range(per_epoch)]
        seen = [i for ids in steps for i in ids]
        assert len(set(seen)) == len(seen) == size - order.left_over
        assert set(seen) <= training
        assert all(len(ids) == order.global_batch_size for ids in steps[:-1])
        assert len(steps[-1]) == (
            order.global_batch_size if order.last_batch == "drop" else (size - 1) % order.global_batch_size + 1
        )


@QUICK
@given(orders(), st.integers(0, 40))
def test_samples_before_is_the_number_of_samples_of_the_steps_before(order: SampleOrder, step: int) -> None:
    assert order.samples_before(step) == sum(len(order.samples_of(k)) for k in range(step))


@QUICK
@given(st.integers(1, 400), st.floats(0, 0.9), st.integers(0, 9), st.booleans())
def test_a_split_is_disjoint_and_complete(size: int, fraction: float, seed: int, shuffle: bool) -> None:
    split = Split(size, fraction, seed, shuffle)
    training = split.training_ids(np.arange(split.num_training)).tolist()
    held_out = split.held_out_ids(np.arange(split.num_held_out)).tolist()
    assert sorted(training + held_out) == list(range(size))
    assert split.num_held_out <= size * fraction + 1e-9 < split.num_held_out + 1 + 1e-9
    assert shuffle or training == list(range(split.num_training))  # the data set's own order stays


def test_a_share_that_is_whole_in_decimals_is_whole() -> None:
    assert Split(100, 0.29, 0).num_held_out == 29  # 100 * 0.29 is 28.999999999999996
    assert [Split(10, f / 10, 0).num_held_out for f in range(10)] == list(range(10))


def test_epochs_and_seeds_differ_and_the_order_without_shuffling_does_not() -> None:
    def epochs(seed: int, shuffle: bool) -> list[list[int]]:
        order = SampleOrder(Split(50, 0.0, seed), 50, seed, shuffle)
        return [order.samples_of(epoch).tolist() for epoch in range(3)]

    shuffled = epochs(0, True) + epochs(1, True)
    assert len({tuple(ids) for ids in shuffled}) == 6
    assert epochs(0, False) == [list(range(50))] * 3


def test_a_step_larger_than_a_block_of_the_shuffle_is_whole() -> None:
    order = SampleOrder(Split(20_000, 0.1, 3), 9_001, 3, last_batch="keep")
    assert len({i for step in range(2) for i in order.samples_of(step).tolist()}) == 18_000
    alone = permute(np.arange(9_001), 18_000, "order/3/0")
    assert order.samples_of(0).tolist() == order.split.training_ids(alone).tolist()
    assert [len(order.samples_of(k)) for k in range(3)] == [9_001, 8_999, 9_001]


def grid(order: SampleOrder, micro: int, ranks: int, step: int) -> list[list[list[int]]]:
    """For each rank, the ids of its microbatches."""
    plan = BatchPlan(order.global_batch_size, micro, ranks)
    return [[p.ids.tolist() for p in Cut(order, plan, rank).places_of(step)] for rank in range(ranks)]


@QUICK
@given(st.data())
def test_ranks_deal_out_a_step_in_the_order_of_the_microbatch_grid(data: st.DataObject) -> None:
    micro, ranks, per_rank = (data.draw(st.integers(1, 4)) for _ in range(3))
    batch = micro * ranks * per_rank
    size = batch + data.draw(st.integers(0, batch))
    order = SampleOrder(Split(size, 0.0, 0), batch, 0, last_batch=data.draw(st.sampled_from(["drop", "keep"])))
    for step in range(3):
        dealt = grid(order, micro, ranks, step)
        wanted = order.samples_of(step).tolist()
        assert [i for rank in dealt for ids in rank for i in ids] == wanted
        assert len({len(rank) for rank in dealt}) == 1  # as many forward passes on each rank, stand-ins included
        whole = [wanted[i : i + micro] for i in range(0, len(wanted), micro)]
        assert [ids for rank in dealt for ids in rank if ids] == whole


def test_places_say_where_they_are_and_which_is_the_last() -> None:
    order = SampleOrder(Split(13, 0.0, 0), 8, 0, last_batch="keep")
    cuts = [Cut(order, BatchPlan(8, 2, 2), rank) for rank in range(2)]
    places = [[(p.step, p.epoch, p.index, len(p.ids), p.last) for p in cut.places(0, 3)] for cut in cuts]
    assert places[0] == [
        (0, 0, 0, 2, False), (0, 0, 1, 2, True),
        (1, 0, 0, 2, False), (1, 0, 1, 2, True),  # 5 samples: microbatches of 2, 2, 1
        (2, 1, 0, 2, False), (2, 1, 1, 2, True),
    ]  # fmt: skip
    assert places[1] == [
        (0, 0, 2, 2, False), (0, 0, 3, 2, True),
        (1, 0, 2, 1, False), (1, 0, 3, 0, True),  # the last a stand-in
        (2, 1, 2, 2, False), (2, 1, 3, 2, True),
    ]  # fmt: skip


def test_b041_ranks_change_epoch_together() -> None:
    order = SampleOrder(Split(10, 0.0, 0), 6, 0)
    assert order.steps_per_epoch == 1 and order.left_over == 4
    for step in range(4):
        dealt = grid(order, 2, 3, step)
        assert [len(rank) for rank in dealt] == [1, 1, 1]
        assert len({i for rank in dealt for ids in rank for i in ids}) == 6


def test_101_samples_in_steps_of_32() -> None:
    drop = SampleOrder(Split(101, 0.0, 0), 32, 0)
    assert [len(drop.samples_of(k)) for k in range(drop.steps_per_epoch)] == [32, 32, 32]
    assert drop.left_over == 5 and "leaves 5 of them unused, others each time" in drop.sentence()
    unused = [set(range(101)) - {i for k in range(3) for i in drop.samples_of(3 * e + k).tolist()} for e in range(2)]
    assert unused[0] != unused[1]
    keep = SampleOrder(Split(101, 0.0, 0), 32, 0, last_batch="keep")
    assert [len(keep.samples_of(k)) for k in range(keep.steps_per_epoch)] == [32, 32, 32, 5]
    assert keep.left_over == 0 and "the last step of each has 5 samples" in keep.sentence()


def test_b031_what_drop_leaves_is_only_ever_less_than_one_batch() -> None:
    order = SampleOrder(Split(9, 0.0, 0), 5, 0)
    assert len(order.samples_of(0)) == 5 and "leaves 4 of them unused" in order.sentence()


def test_less_than_one_batch_is_refused_with_what_works() -> None:
    with pytest.raises(DataError, match=r"4 samples.*no whole global batch of 5.*global_batch_size = 4.*keep"):
        SampleOrder(Split(5, 0.2, 0), 5, 0)
    assert SampleOrder(Split(4, 0.0, 0), 5, 0, last_batch="keep").samples_of(1).size == 4


def test_b043_the_position_is_the_step_alone() -> None:
    one, other = (SampleOrder(Split(20, 0.0, 7), 2, 7, shuffle=False) for _ in range(2))
    for k in range(5):
        one.samples_of(k)
    assert other.samples_of(5).tolist() == one.samples_of(5).tolist() == [10, 11]
