"""The search finds what a loop over every candidate finds, and fast."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.candidate import Candidate
from meshwright.cost.memory import estimate
from meshwright.cost.traffic import traffic
from meshwright.plan.option import Options, option_of
from meshwright.plan.price import price_s
from meshwright.plan.search import ALIKE, CHUNK, Found, rung_of, runs, search
from meshwright.plan.setting import Setting
from meshwright.plan.space import Knobs, cuts_of, spread
from plan.some_models import LLAMA_405B, cluster_of, dense, job_of
from plan.test_rules import by_hand

SMALL_MODELS = st.builds(
    dense,
    n_layers=st.integers(1, 6),
    d_model=st.sampled_from([256, 512]),
    n_heads=st.sampled_from([4, 8]),
    n_kv_heads=st.sampled_from([2, 4]),
    d_ff=st.sampled_from([512, 1024]),
    vocab_size=st.just(1000),
    seq_len=st.sampled_from([512, 2048]),
    n_experts=st.sampled_from([0, 4]),
)


def key_by_hand(setting: Setting, one: Candidate, runs_first: bool) -> tuple[float, ...]:
    """ORDER for one candidate, priced alone."""
    memory = estimate(setting.job, one)
    fits, reserved = int(memory.fits[0]), float(memory.reserved_bytes[0])
    price = float(price_s(setting.job, setting.cluster, one, traffic(setting.job, one))[0])
    planned = one.cp > 1 or one.ep > 1 or one.offload > 0
    hybrid = one.dp_replicate > 1 and one.dp_shard > 1
    rung = 5 if one.pp > 1 else 4 if one.tp > 1 else 3 if hybrid else one.zero_stage
    axes = (one.dp_replicate, one.dp_shard, one.tp, one.pp, one.chunks)
    return (
        0.0 if fits else reserved,
        runs_first and planned,
        planned,
        2 - fits,
        rung + 10 * (one.recompute == 2),
        math.floor(math.log(price) / math.log1p(ALIKE)),
        sum(degree > 1 for degree in axes) + (one.recompute > 0),
        price,
        -one.microbatch_size,
    )


def by_loop(setting: Setting, found: Found, runs_first: bool) -> tuple[dict[int, Candidate], Candidate | None]:
    """The best legal candidate of each layout and of all, one row at a time."""
    best: dict[int, tuple[tuple[float, ...], int]] = {}
    for row, layout in enumerate(found.space.layout.tolist()):
        one = found.space.columns.at(row)
        if by_hand(setting, one) is not None:
            continue
        key = (key_by_hand(setting, one, runs_first), row)
        best[layout] = min(best.get(layout, key), key)
    first = min(best.values(), default=None)
    candidates = {layout: found.space.columns.at(row) for layout, (_, row) in best.items()}
    return candidates, found.space.columns.at(first[1]) if first else None


@settings(max_examples=15, deadline=None)
@given(
    SMALL_MODELS, st.sampled_from([1, 2, 4]), st.sampled_from([4, 8, 12]), st.floats(0.02, 1.0), st.booleans(),
    st.sampled_from([None, 1]),
)  # fmt: skip
def test_the_choice_is_that_of_a_loop_over_every_candidate(model, devices, batch, gigabytes, runs_first, micro) -> None:
    job = job_of(model, global_batch_size=batch, gigabytes=1.3 + gigabytes)  # the device's context takes 0.8 to 2
    setting = Setting(job=job, cluster=cluster_of(1, devices))
    knobs = Knobs(microbatch_size=micro, schedule="1f1b")
    found = search(setting, spread(cuts_of(devices, devices, model), batch, knobs), runs_first=runs_first)
    candidates, chosen = by_loop(setting, found, runs_first)
    ranking = [found.columns.at(int(place)) for place in found.ranking()]
    assert (ranking[0] if ranking else None) == chosen
    assert [found.columns.at(int(place)) for place in found.best()] == list(candidates.values())
    keys = [key_by_hand(setting, one, runs_first) for one in ranking]
    assert keys == sorted(keys)


def found_for(setting: Setting, **options: bool) -> Found:
    cluster, job = setting.cluster, setting.job
    return search(
        setting, spread(cuts_of(cluster.num_devices, setting.node, job.model), job.global_batch_size), **options
    )


def test_chunks_of_rows_are_priced_as_one() -> None:
    setting = Setting(job=job_of(dense()), cluster=cluster_of(4))
    found = found_for(setting)
    assert len(found.legal) > CHUNK
    whole = estimate(setting.job, found.columns)
    assert np.array_equal(whole.reserved_bytes, found.memory.reserved_bytes)
    assert np.array_equal(whole.fits, found.memory.fits)
    assert np.array_equal(traffic(setting.job, found.columns).total_bytes, found.sent_bytes)


def test_an_option_of_a_search_is_explained_as_the_candidate_alone() -> None:
    setting = Setting(job=job_of(dense()), cluster=cluster_of(4))
    found = found_for(setting)
    options, places = Options(setting.job, found), range(0, len(found.legal), len(found.legal) // 60)
    assert {found.columns.at(place).pp for place in places} >= {1, 2, 4}
    for place in places:
        alone = option_of(replace(setting.job), found.columns.at(place))
        assert options.at(place) == alone, alone.phrase


def test_first_of_a_mask_is_the_least_key_of_it() -> None:
    found = found_for(Setting(job=job_of(dense()), cluster=cluster_of(1)))
    rng = np.random.default_rng(0)
    rows = list(zip(*(key.tolist() for key in found.keys), strict=True))
    for _ in range(20):
        mask = rng.random(len(rows)) < 0.02
        places = np.flatnonzero(mask)
        assert found.first(mask) == min(places, key=lambda place: (rows[place], place))
    assert found.first(np.zeros(len(rows), bool)) is None


def test_a_start_takes_what_is_run_even_where_it_is_tight() -> None:
    setting = Setting(job=job_of(dense(), gigabytes=40.0), cluster=cluster_of(1))
    for found in (found_for(setting), found_for(setting, runs_first=True)):
        first = found.columns.at(int(found.ranking()[0]))
        assert runs(first) and first.tp > 1 and found.memory.fits[found.ranking()[0]] > 0


def test_what_is_planned_comes_after_all_else_that_fits() -> None:
    found = found_for(Setting(job=job_of(dense(), gigabytes=200.0), cluster=cluster_of(1)))
    ranking = [found.columns.at(int(place)) for place in found.ranking() if found.memory.fits[place] > 0]
    planned = [one.cp > 1 or one.ep > 1 or one.offload > 0 for one in ranking]
    assert planned == sorted(planned) and any(planned)


def test_more_memory_never_asks_for_a_higher_rung() -> None:
    chosen = []
    for gigabytes in (40, 50, 60, 80, 100, 150, 200, 400):
        found = found_for(Setting(job=job_of(dense(), gigabytes=gigabytes), cluster=cluster_of(1)))
        first = found.columns.at(int(found.ranking()[0]))
        chosen.append((int(rung_of(first)), first.word))
    assert [rung for rung, _ in chosen] == sorted((rung for rung, _ in chosen), reverse=True)
    assert chosen[-1] == (0, "ddp8") and {"zero1x8", "zero2x8"} <= {word for _, word in chosen}


@pytest.mark.alone
def test_a_405b_on_16384_devices_is_searched_within_half_a_second() -> None:
    setting = Setting(job=job_of(dense(**LLAMA_405B)), cluster=cluster_of(2048))
    spent = []
    for _ in range(3):
        before = time.process_time()
        found = found_for(setting)
        ranking = found.ranking()
        spent.append(time.process_time() - before)
    assert len(found.broken) >= 100_000 and len(ranking)
    assert min(spent) < 0.5, spent  # the goal that the project states for this search; processor time, one thread


def test_nothing_legal_is_an_empty_ranking() -> None:
    setting = Setting(job=job_of(dense(), global_batch_size=7), cluster=cluster_of(1))
    space = spread([(8, 1, 0, 1, 1, 1, 1)], 7)
    found = search(setting, space)
    assert len(found.ranking()) == 0 and len(found.best()) == 0 and len(found.memory.fits) == 0
