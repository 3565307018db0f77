"""The space: every layout over the whole cluster, once, with every setting of its knobs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.candidate import RECOMPUTE, SCHEDULES
from meshwright.plan.space import CUT_AXES, FEWEST_TOKENS, Cut, Knobs, cuts_of, spread
from plan.some_models import LLAMA_405B, dense

FEW = settings(max_examples=40, deadline=None)


def by_filter(devices: int, node: int, n_layers: int, n_experts: int, seq_len: int) -> Iterator[Cut]:
    """The same space from a raw grid: all degrees, and what does not multiply or goes too far left out."""
    numbers = range(1, devices + 1)
    widest = min((n for n in numbers if devices % n == 0 and n > node), default=devices)
    for tp, pp, cp, shard, ep in product(numbers, repeat=5):
        if devices % (tp * pp * cp * shard) or (ep > 1 and (cp > 1 or ep > n_experts or shard % ep)):
            continue
        deepest = min((n for n in numbers if (devices // tp) % n == 0 and n > n_layers), default=devices)
        if tp > widest or pp > deepest or (cp > 1 and cp * FEWEST_TOKENS > seq_len):
            continue
        replicate = devices // (tp * pp * cp * shard)
        if ep > 1 and replicate > 1:
            continue
        for stage in (0,) if shard == 1 else (1, 2, 3):
            yield replicate, shard, stage, tp, pp, cp, ep


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("n_experts", [0, 4])
def test_divisors_find_what_a_filtered_grid_finds(devices: int, n_experts: int) -> None:
    model = dense(n_layers=3, n_experts=n_experts, seq_len=2048)
    found = cuts_of(devices, 4, model)
    assert len(found) == len(set(found))
    assert set(found) == set(by_filter(devices, 4, 3, n_experts, 2048))


def test_a_model_without_known_heads_is_not_offered_tp() -> None:
    model = dense(n_heads=32)
    headless = type(model)(**{name: getattr(model, name) for name in model.__slots__} | {"n_heads": 0})
    assert {cut[3] for cut in cuts_of(8, 8, headless)} == {1, 2}  # 2 shows the rule


@FEW
@given(st.integers(1, 64), st.integers(1, 96), st.sampled_from([2, 4, 8]))
def test_every_row_uses_every_device_and_the_whole_batch_where_it_divides(devices: int, batch: int, node: int) -> None:
    space = spread(cuts_of(devices, node, dense(n_layers=4)), batch)
    c = space.columns
    assert np.all(c.world_size == devices)
    ranks = c.dp_replicate * c.dp_shard
    whole = batch % ranks == 0
    assert np.all((ranks * c.microbatch_size * c.num_microbatches)[whole] == batch)
    assert np.all((c.chunks > 1) <= (c.pp > 1))
    assert np.all(np.diff(space.layout) >= 0)


def test_no_row_stands_twice() -> None:
    c = spread(cuts_of(16, 8, dense(n_layers=8)), 64).columns
    rows = np.stack([np.broadcast_to(getattr(c, name), (len(c),)) for name in c.__slots__], axis=1)
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_rows_of_a_layout_stand_together_and_say_which() -> None:
    cuts = cuts_of(16, 8, dense(n_layers=8))
    space = spread(cuts, 64)
    assert space.num_layouts == len(cuts)
    for row in range(0, len(space.columns), 97):
        one = space.columns.at(row)
        assert tuple(getattr(one, name) for name in CUT_AXES) == cuts[space.layout[row]]


def test_what_the_user_fixed_stays_fixed() -> None:
    knobs = Knobs(microbatch_size=4, recompute="full", sync="last", schedule="gpipe", offload="none")
    c = spread(cuts_of(16, 8, dense(n_layers=8)), 64, knobs).columns
    assert set(c.microbatch_size.tolist()) == {4}
    assert set(c.recompute.tolist()) == {RECOMPUTE.index("full")}
    assert set(c.sync_every.tolist()) == {0} and set(c.offload.tolist()) == {0}
    assert set(c.schedule[c.pp > 1].tolist()) == {SCHEDULES.index("gpipe")}


def test_a_large_share_of_the_batch_has_a_microbatch_near_each_power_of_two() -> None:
    sizes = set(spread([(1, 1, 0, 1, 1, 1, 1)], 5040).columns.microbatch_size.tolist())
    assert sizes == {1, 2, 4, 8, 16, 30, 63}
    assert all(5040 % size == 0 for size in sizes)
    assert max(size for size in range(1, 65) if 5040 % size == 0) == 63


def test_a_405b_on_16384_devices_has_more_than_100000_combinations() -> None:
    model = dense(**LLAMA_405B)
    space = spread(cuts_of(16384, 8, model), 1024)
    assert len(space.columns) >= 100_000
    assert math.prod(getattr(space.columns.at(0), name) for name in ("dp_replicate", "dp_shard", "tp", "pp")) == 16384


def test_an_empty_list_of_layouts_is_an_empty_space() -> None:
    space = spread([], 8)
    assert len(space.layout) == 0 and len(space.columns.tp) == 0
