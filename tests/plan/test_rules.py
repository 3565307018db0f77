"""The rules: which rows break one, why, and that what is called nearest works."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.candidate import SCHEDULES, Candidate, Columns
from meshwright.plan.rules import BY_NAME, RULES, first_broken
from meshwright.plan.setting import Setting, legal_tp
from plan.some_models import cluster_of, dense, job_of

MODEL = dense(n_layers=32, n_heads=32, n_kv_heads=8)


def setting_of(model=MODEL, nodes: int = 4, batch: int = 64, cuttable: bool = True) -> Setting:
    return Setting(job=job_of(model, global_batch_size=batch), cluster=cluster_of(nodes), cuttable=cuttable)


def broken(setting: Setting, one: Candidate) -> str | None:
    row = Columns(**{name: np.array([getattr(one, name)]) for name in Columns.__slots__})
    number = int(first_broken(setting, row)[0])
    return RULES[number - 1].name if number else None


SOUND = Candidate(dp_shard=4, zero_stage=3, microbatch_size=1, num_microbatches=16)
PIPELINE = Candidate(pp=4, dp_shard=2, zero_stage=1, microbatch_size=1, num_microbatches=32)
REPLICAS = Candidate(pp=4, dp_replicate=2, microbatch_size=1, num_microbatches=32)


def with_(one: Candidate = SOUND, **changes: int) -> Candidate:
    return replace(one, **changes)


def schedule(name: str) -> int:
    return SCHEDULES.index(name)


CASES = [
    ("devices", with_(dp_shard=64, num_microbatches=1), "64 ranks", "zero3x32"),
    ("tp-heads", with_(tp=3), "3 does not divide the 32 query heads", "tp 2 or 4"),
    ("pp-layers", with_(PIPELINE, pp=8, chunks=6, schedule=2), "48 parts, and the model has 32 layers", "pp 4"),
    ("ep-experts", with_(ep=2), "the 0 experts", "ep 1"),
    ("cp-sequence", with_(cp=3, dp_shard=1, zero_stage=0), "2 x cp 3 does not divide seq_len 4096", "cp 2 or 4"),
    ("hsdp-nodes", with_(dp_replicate=2, dp_shard=12, num_microbatches=2), "12 ranks, neither", "dp_shard 8 or 24"),
    ("batch", with_(dp_shard=24), "not a whole number", "16 or 32 ranks"),
    ("microbatch", with_(microbatch_size=3), "not a whole number", "microbatch_size 2 or 4"),
    ("pp-microbatches", with_(PIPELINE, num_microbatches=2, microbatch_size=16), "at least 4 microbatches", "gpipe"),
    ("pp-rounds", with_(PIPELINE, schedule=2, chunks=2, num_microbatches=2, microbatch_size=16), "rounds of", "1f1b"),
    ("zero-bubble-zero3", with_(PIPELINE, zero_stage=3, schedule=schedule("zbv"), chunks=2), "wrong gradients", "1f1b"),
    ("zero-bubble-recompute", with_(PIPELINE, recompute=2, schedule=schedule("zbv"), chunks=2), "each of its", "1f1b"),
    ("pp-sync", with_(PIPELINE, sync_every=1), "sync is every with pp 4", "sync last"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "one", "because", "nearest"), CASES, ids=[case[0] for case in CASES])
def test_a_broken_rule_is_named_with_its_numbers_and_what_works(name, one, because, nearest) -> None:
    setting = setting_of(batch=64)
    assert broken(setting, one) == name
    assert because in BY_NAME[name].because(setting, one)
    assert nearest in BY_NAME[name].nearest(setting, one)
    assert BY_NAME[name].nearest(setting, one).startswith("Nearest")


def test_what_breaks_no_rule_is_legal() -> None:
    assert broken(setting_of(), SOUND) is None
    assert broken(setting_of(), PIPELINE) is None
    assert broken(setting_of(), with_(REPLICAS, schedule=schedule("zbv"), chunks=2)) is None  # no DDP reducer there
    assert broken(setting_of(), Candidate(num_microbatches=64)) is None


def test_tp_needs_heads_that_are_known() -> None:
    setting = setting_of(replace(MODEL, n_heads=0))
    assert broken(setting, with_(tp=2, dp_shard=2)) == "tp-known"
    assert "tp 1" in BY_NAME["tp-known"].nearest(setting, with_(tp=2))


def test_tp_divides_the_sequence_and_neither_the_hidden_units_nor_the_vocabulary() -> None:
    odd = replace(MODEL, architecture={"d_ff": 101}, vocab_size=50257)
    assert broken(setting_of(odd), with_(tp=8)) is None
    assert broken(setting_of(replace(MODEL, seq_len=1025)), with_(tp=2)) == "tp-sequence"


@pytest.mark.parametrize(
    ("n_kv_heads", "legal"), [(1, [1, 2, 4, 8]), (2, [1, 2, 4, 8]), (3, [1]), (6, [1, 2]), (8, [1, 2, 4, 8])]
)
def test_a_head_of_keys_is_shared_by_whole_numbers_of_ranks(n_kv_heads: int, legal: list[int]) -> None:
    setting = setting_of(dense(n_heads=24 if n_kv_heads in (3, 6) else 32, n_kv_heads=n_kv_heads, d_model=3072))
    assert legal_tp(setting) == (legal if n_kv_heads != 3 else [1]), n_kv_heads
    for tp in (2, 4, 8):
        assert (broken(setting, with_(tp=tp)) is None) == (tp in legal_tp(setting))
    if n_kv_heads == 3:
        assert broken(setting, with_(tp=2)) == "tp-kv-heads"
        assert "2 does not divide the 3 key and value heads" in BY_NAME["tp-kv-heads"].because(setting, with_(tp=2))


def test_tp_needs_an_optimizer_that_is_elementwise() -> None:
    setting = replace(setting_of(), elementwise=False)
    assert broken(setting, with_(tp=2)) == "tp-optimizer"
    assert broken(setting, SOUND) is None and legal_tp(setting) == [1]


def test_tp_stays_on_the_fast_link() -> None:
    wide = dense(n_heads=64, n_kv_heads=64, d_model=8192)
    one = with_(tp=16, dp_shard=2, num_microbatches=32)
    assert broken(setting_of(wide), one) == "tp-node"
    rack = replace(cluster_of(4), scaleup_devices=32)
    assert broken(replace(setting_of(wide), cluster=rack), one) is None


def test_experts_are_dealt_out_among_the_ranks_of_a_shard_group() -> None:
    experts = dense(n_experts=8)
    assert broken(setting_of(experts), with_(ep=4)) is None
    assert broken(setting_of(experts), with_(ep=3)) == "ep-experts"
    assert broken(setting_of(experts), with_(ep=8)) == "ep-ranks"
    assert "ep 4" in BY_NAME["ep-ranks"].nearest(setting_of(experts), with_(ep=8))


def test_an_optimizer_of_whole_matrices_is_not_sharded() -> None:
    setting = setting_of(cuttable=False)
    assert broken(setting, SOUND) == "optimizer-parts"
    assert broken(setting, Candidate(dp_replicate=4, num_microbatches=16)) is None


@pytest.mark.parametrize("pp", [4, 8, 16])
def test_126_layers_on_stages_that_do_not_divide_them_are_legal(pp: int) -> None:
    setting = setting_of(dense(n_layers=126))
    assert broken(setting, Candidate(pp=pp, num_microbatches=64, microbatch_size=1)) is None


def test_legal_tp_degrees_pass_every_rule_of_tp() -> None:
    setting = setting_of()
    legal = legal_tp(setting)
    assert legal == [1, 2, 4, 8]
    for tp in range(2, 33):
        found = broken(setting, Candidate(tp=tp, num_microbatches=64))
        assert (found is None) == (tp in legal), tp


def by_hand(setting: Setting, one: Candidate) -> str | None:
    """The rules again, one candidate at a time, in plain Python."""
    model, batch, node = setting.job.model, setting.job.global_batch_size, setting.cluster.devices_per_node
    dp, group = one.dp_replicate * one.dp_shard, one.dp_shard * one.cp * one.tp
    name = SCHEDULES[one.schedule]
    checks = (
        ("devices", one.world_size > setting.num_devices),
        ("tp-known", one.tp > 1 and not model.n_heads),
        ("tp-heads", one.tp > 1 and model.n_heads % one.tp),
        ("tp-kv-heads", one.tp > 1 and model.n_kv_heads % one.tp and one.tp % model.n_kv_heads),
        ("tp-sequence", one.tp > 1 and model.seq_len % (one.tp * one.cp)),
        ("tp-node", one.tp > node or node % one.tp),
        ("pp-layers", one.pp > 1 and one.pp * one.chunks > model.n_layers),
        ("ep-experts", one.ep > 1 and (not model.n_experts or model.n_experts % one.ep)),
        ("ep-ranks", one.ep > 1 and one.dp_shard * one.cp % one.ep),
        ("cp-sequence", one.cp > 1 and model.seq_len % (2 * one.cp)),
        ("hsdp-nodes", one.dp_shard > 1 and one.dp_replicate > 1 and group % node and node % group),
        ("optimizer-parts", one.zero_stage and not setting.cuttable),
        ("batch", batch % dp),
        ("microbatch", batch % (dp * one.microbatch_size)),
        ("pp-microbatches", one.pp > 1 and name == "1f1b" and one.num_microbatches < one.pp),
        ("pp-rounds", one.pp > 1 and name.startswith("interleaved") and one.num_microbatches % one.pp),
        ("pp-sync", one.pp > 1 and one.sync_every),
        ("zero-bubble-zero3", one.pp > 1 and name in ("interleaved-zero-bubble", "zbv") and one.zero_stage == 3),
        ("zero-bubble-recompute", one.pp > 1 and name in ("interleaved-zero-bubble", "zbv") and one.recompute),
    )
    return next((rule for rule, breaks in checks if breaks), None)


SMALL = st.sampled_from([1, 1, 2, 3, 4, 8])
CANDIDATES = st.builds(
    Candidate,
    dp_replicate=SMALL, dp_shard=SMALL, zero_stage=st.integers(1, 3), tp=SMALL, pp=SMALL, cp=SMALL, ep=SMALL,
    chunks=st.integers(1, 4), schedule=st.integers(0, 4), microbatch_size=SMALL, num_microbatches=st.integers(1, 12),
    sync_every=st.integers(0, 1), recompute=st.integers(0, 2),
).map(lambda one: one if one.dp_shard > 1 else replace(one, zero_stage=0))  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(CANDIDATES, st.sampled_from([0, 8]), st.sampled_from([12, 64]), st.booleans())
def test_whole_columns_break_the_rules_that_one_candidate_breaks(one, n_experts, batch, cuttable) -> None:
    setting = setting_of(dense(n_experts=n_experts, n_heads=24, n_kv_heads=8, d_model=3072), 4, batch, cuttable)
    found = broken(setting, one)
    assert found == by_hand(setting, one)
    if found:
        words = BY_NAME[found].because(setting, one), BY_NAME[found].nearest(setting, one)
        assert all(words) and not re.search(r"None|nan|\bof at most 0\b", " ".join(words)), words


def test_every_rule_has_a_sentence_and_its_own_name() -> None:
    assert len(BY_NAME) == len(RULES)
    assert all(rule.text.endswith(".") for rule in RULES)
