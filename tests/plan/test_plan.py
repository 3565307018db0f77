"""The plan: its ladder, rejections, counts and advice belong together, and say what is so."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.candidate import Candidate, Columns
from meshwright.cost.memory import estimate
from meshwright.errors import LayoutError, NoFeasibleLayout
from meshwright.plan.fixes import distance, nearest_fitting
from meshwright.plan.option import Option, Rejection
from meshwright.plan.plan import Plan, Request, make_plan, require_chosen
from meshwright.plan.rules import BY_NAME, first_broken
from meshwright.plan.search import is_planned, search
from meshwright.plan.setting import Setting
from meshwright.plan.space import cuts_of, spread
from meshwright.spec.model_spec import Bytes
from plan.some_models import LLAMA_405B, cluster_of, dense, job_of


def plan_of(
    model=None, *, nodes: int = 1, devices: int = 8, gigabytes: float = 80.0, batch: int = 1024, **changes
) -> Plan:
    model = model or dense()
    job = job_of(model, global_batch_size=batch, gigabytes=gigabytes)
    return make_plan(Request(job=job, cluster=cluster_of(nodes, devices, gigabytes), **changes))


def rung(plan: Plan, name: str):
    return next(one for one in plan.ladder if one.name == name)


def test_the_rungs_stand_in_the_order_of_the_rule() -> None:
    names = [one.name for one in plan_of().ladder]
    assert names == ["ddp", "zero1", "zero2", "zero3", "hsdp", "tp", "pp", "full recompute"]


def test_the_first_rung_that_fits_has_the_choice() -> None:
    for gigabytes in (50.0, 80.0, 120.0, 300.0):
        plan = plan_of(gigabytes=gigabytes)
        first = next(one for one in plan.ladder if one.fits == "yes")
        assert plan.chosen is not None and first.option == plan.chosen


def test_each_rung_says_by_how_much_it_misses_and_what_would_fit() -> None:
    plan = plan_of()
    ddp = rung(plan, "ddp")
    assert ddp.fits == "no" and ddp.option is not None and ddp.shortfall_bytes is not None
    assert ddp.shortfall_bytes == ddp.option.memory.reserved_bytes - 80_000_000_000 > 0
    assert "too many" in ddp.because and "optimizer_state" in ddp.because
    assert ddp.fix.startswith("zero") and "GiB" in ddp.fix


def test_one_device_has_one_rung_with_a_candidate_besides_recompute() -> None:
    plan = plan_of(devices=1, gigabytes=400.0)
    assert [one.name for one in plan.ladder if one.option] == ["single", "full recompute"]
    assert "at least 2 devices" in rung(plan, "zero1").because
    assert plan.chosen is not None and plan.chosen.word == "single"


def test_a_rung_that_no_batch_allows_is_measured_all_the_same() -> None:
    plan = plan_of(dense(**LLAMA_405B), nodes=2048)
    zero3 = rung(plan, "zero3")
    assert zero3.fits == "no" and not zero3.is_legal and zero3.option is not None
    assert zero3.because.startswith("1024 / (16384 data-parallel ranks")
    assert "1024 ranks" in zero3.fix


def test_candidates_are_the_best_of_different_layouts_the_choice_first() -> None:
    plan = plan_of(top=5)
    assert len(plan.candidates) == 5 and plan.candidates[0] == plan.chosen
    assert len({option.word for option in plan.candidates}) == 5
    assert all(option.fits != "no" for option in plan.candidates)


def test_counts_add_up() -> None:
    for plan in (plan_of(), plan_of(nodes=4), plan_of(devices=1), plan_of(dense(n_experts=8), nodes=2)):
        counts = plan.counts
        assert sum(counts.rejected.values()) == counts.considered - counts.fitting
        assert counts.considered - counts.legal == sum(n for rule, n in counts.rejected.items() if rule != "memory")
        assert set(counts.rejected) <= set(BY_NAME) | {"memory"}


def test_every_rule_that_rejects_anything_is_shown_at_least_once() -> None:
    for plan in (plan_of(), plan_of(dense(**LLAMA_405B), nodes=2048), plan_of(dense(n_experts=8), nodes=3, batch=96)):
        shown = {one.rule for one in plan.rejections}
        by_rule = {rule for rule in plan.counts.rejected if rule != "memory"}
        assert by_rule <= shown
        assert len(plan.rejections) <= 50
        assert all(one.because.endswith(".") and one.nearest.startswith("Nearest") for one in plan.rejections)
        assert all((one.option is not None) == (one.rule == "memory") for one in plan.rejections)


def test_what_is_rejected_for_memory_fits_with_no_knobs() -> None:
    plan = plan_of()
    words = [one.layout for one in plan.rejections if one.rule == "memory"]
    assert words[0] == "ddp8"
    fitting = {option.word for option in plan_of(top=10_000).candidates if not option.is_planned}
    assert not fitting & set(words)


def test_named_layouts_are_all_looked_at_fitting_or_not() -> None:
    plan = plan_of(layouts=("ddp8", "zero2x8", "zero3x4", "tp3"))
    assert {option.word for option in plan.candidates} == {"ddp8", "zero2x8", "zero3x4"}
    assert plan.chosen is not None and plan.chosen.word == "zero2x8"
    assert [one.rule for one in plan.rejections if one.layout == "tp3"] == ["tp-heads"]
    ddp = next(option for option in plan.candidates if option.word == "ddp8")
    assert ddp.fits == "no" and ddp.candidate.offload == 0


def test_a_named_layout_larger_than_the_cluster_is_rejected_with_one_that_is_not() -> None:
    plan = plan_of(layouts=("zero3x16",))
    assert plan.chosen is None
    assert plan.rejections[0].rule == "devices" and "zero3x8" in plan.rejections[0].nearest
    with pytest.raises(NoFeasibleLayout, match="no layout is legal: zero3x16"):
        require_chosen(plan)


@pytest.mark.parametrize("word", ["zero4x8", "cp1", "cp2+cp4", "sharded8"])
def test_a_word_that_is_no_layout_is_refused(word: str) -> None:
    with pytest.raises(LayoutError):
        plan_of(layouts=(word,))


def test_named_layouts_may_use_cp_and_ep() -> None:
    plan = plan_of(dense(n_experts=8), nodes=2, layouts=("zero3x8+cp2", "zero3x16+ep8"))
    assert {option.word for option in plan.candidates} == {"zero3x8+cp2", "zero3x16+ep8"}
    assert not any(option.runs for option in plan.candidates)


def test_the_layout_of_a_recipe_stands_beside_the_choice() -> None:
    fits, broken = plan_of(asked="zero3x8").asked, plan_of(asked="tp3").asked
    assert isinstance(fits, Option) and fits.word == "zero3x8" and fits.fits == "yes"
    assert isinstance(broken, Rejection) and broken.rule == "tp-heads"


def test_what_this_version_runs_stands_beside_a_choice_that_it_does_not() -> None:
    found = [plan_of(gigabytes=gigabytes) for gigabytes in (80.0, 40.0, 20.0, 10.0)]
    for plan in found:
        assert plan.runnable is None or plan.runnable == plan.chosen  # what is planned comes last of all
        assert plan.chosen is None or plan.chosen.runs != plan.chosen.is_planned
    assert any(plan.chosen and plan.chosen.runs and plan.chosen.candidate.tp > 1 for plan in found)


def test_the_least_change_that_fits_is_the_fix() -> None:
    job = job_of(dense(), gigabytes=80.0)
    setting = Setting(job=job, cluster=cluster_of(1))
    found = search(setting, spread(cuts_of(8, 8, job.model), 1024))
    one = Candidate(dp_shard=8, zero_stage=1, num_microbatches=128)
    place = nearest_fitting(found, one)
    assert place is not None
    away = distance(found.columns, one)
    unplanned = (found.memory.fits > 0) & ~is_planned(found.columns)
    assert away[place] == away[unplanned].min() and unplanned[place]


def test_nothing_fits_says_what_is_missing_and_what_to_buy() -> None:
    plan = plan_of(dense(**LLAMA_405B), nodes=2)
    assert plan.chosen is None and not plan.candidates and plan.counts.fitting == 0
    purchase = plan.advice.purchase
    assert purchase is not None and purchase.num_devices > 16
    with pytest.raises(NoFeasibleLayout, match=r"the least that is missing is .* GiB") as raised:
        require_chosen(plan)
    assert f"{purchase.num_devices:,} devices" in raised.value.nearest


def fits(plan: Plan, one: Candidate) -> bool:
    setting = Setting(job=plan.request.job, cluster=plan.request.cluster)
    row = Columns(**{name: np.array([getattr(one, name)]) for name in Columns.__slots__})
    return bool(first_broken(setting, row)[0] == 0 and estimate(plan.request.job, one).fits[0] > 0)


def test_the_largest_microbatch_fits_and_the_next_does_not() -> None:
    plan = plan_of(gigabytes=120.0)
    assert plan.chosen is not None
    one, largest = plan.chosen.candidate, plan.advice.largest_microbatch
    assert largest is not None and largest >= one.microbatch_size
    share = 1024 // (one.dp_replicate * one.dp_shard)
    assert fits(plan, replace(one, microbatch_size=largest, num_microbatches=share // largest))
    assert not fits(plan, replace(one, microbatch_size=2 * largest, num_microbatches=share // largest // 2))


def test_the_longest_sequence_fits_and_the_next_step_does_not() -> None:
    plan = plan_of(model_at=lambda seq_len: dense(seq_len=seq_len))
    longest = plan.advice.largest_seq_len
    assert plan.chosen is not None and longest is not None and longest % 1024 == 0 and longest >= 4096

    def fits_at(seq_len: int) -> bool:
        return bool(estimate(job_of(dense(seq_len=seq_len)), plan.chosen.candidate).fits[0])

    assert fits_at(longest) and not fits_at(longest + 1024)


def test_a_sequence_grows_no_longer_than_the_model_reaches() -> None:
    def at(seq_len: int):
        return dense(seq_len=seq_len, max_seq_len=8192)

    plan = plan_of(at(4096), gigabytes=40_000.0, model_at=at)
    assert plan.advice.largest_seq_len == 8192


def test_uneven_stages_and_an_odd_vocabulary_get_a_line() -> None:
    plan = plan_of(dense(n_layers=126, vocab_size=50257), layouts=("tp2+pp4",), gigabytes=4000.0)
    lines = " ".join(plan.advice.lines)
    assert "126 over pp 4, by cost with the head's: 31 on 1 rank, 32 on 2 ranks, 31 on 1 rank" in lines
    assert "50,257 rows do not divide by tp 2: a rank has up to 25,129" in lines
    assert "batch: 1,024 samples a step = 1 rank x " in lines


def test_a_model_without_repeated_blocks_is_cut_by_data_parallelism_alone() -> None:
    whole = dense()
    unknown = {"d_model": 0, "vocab_size": 0, "n_heads": 0, "architecture": {}}
    lone = replace(whole, units=(), loss_kept=Bytes(), loss_peak=Bytes(), loss_forward=Bytes(), **unknown)
    plan = plan_of(lone)
    assert plan.chosen is not None and plan.chosen.word == "ddp8"
    assert {one.rule for one in plan.rejections} >= {"tp-known", "pp-layers"}


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5), st.sampled_from([1, 3, 4, 8]), st.integers(1, 40), st.floats(0.5, 200.0),
    st.sampled_from([0, 4]), st.booleans(),
)  # fmt: skip
def test_any_model_on_any_cluster_gets_a_plan(nodes, devices, batch, gigabytes, n_experts, runs_first) -> None:
    shape = {"n_layers": 5, "d_model": 768, "n_heads": 12, "n_kv_heads": 4, "d_ff": 2048, "vocab_size": 999}
    model = dense(**shape, n_experts=n_experts)
    plan = plan_of(
        model, nodes=nodes, devices=devices, batch=batch, gigabytes=gigabytes, runs_first=runs_first, top=3,
        model_at=lambda seq_len: dense(**shape, n_experts=n_experts, seq_len=seq_len),
    )  # fmt: skip
    for option in [*plan.candidates, *(one.option for one in plan.ladder if one.option)]:
        terms = [term.amount for term in option.memory.terms]
        assert all(math.isfinite(amount) and amount >= 0 for amount in terms)
        assert option.memory.total_bytes == math.ceil(sum(terms))
    if plan.chosen is None:
        with pytest.raises(NoFeasibleLayout):
            require_chosen(plan)
    else:
        assert plan.chosen.candidate.world_size == nodes * devices
