"""The rules that a candidate can break, as data: which rows break one, why, and the nearest that works.

A rule about speed alone is not here: what is legal and slow is priced, not refused. Two rules are about both, and every
guide gives them: tp and the shard groups of HSDP exist to stay on a node's fast links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.candidate import PARTED, SCHEDULES, Candidate, Columns
from meshwright.errors import BatchError
from meshwright.plan.setting import (
    Setting,
    expert_ranks_near,
    experts_near,
    hsdp_near,
    layers_near,
    node_near,
    rounds_near,
    sequence_near,
    stages_near,
    tp_near,
    world_near,
)
from meshwright.spec.batch import BatchPlan

Mask = NDArray[np.bool_]
ONE_F_ONE_B: Final = SCHEDULES.index("1f1b")
ROUNDS: Final = (SCHEDULES.index("interleaved1f1b"), SCHEDULES.index("interleaved-zero-bubble"))


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that must hold.

    Attributes:
        name: its id, as in `counts`.
        text: what must hold, in one sentence.
        breaks: which rows break it.
        because: the rule with a candidate's numbers.
        nearest: what works in its place.
    """

    name: str
    text: str
    breaks: Callable[[Setting, Columns], Any]
    because: Callable[[Setting, Candidate], str]
    nearest: Callable[[Setting, Candidate], str]


def first_broken(setting: Setting, columns: Columns) -> NDArray[np.int64]:
    """For each row the number of the first rule that it breaks, counted from 1; 0 for a legal one."""
    first = np.zeros(len(columns), np.int64)
    for number, rule in enumerate(RULES, 1):
        first[(first == 0) & rule.breaks(setting, columns)] = number
    return first


def _tp_divides(what: str, number: Callable[[Setting], int]) -> tuple[Any, Any]:
    """`breaks` and `because` of a rule that tp divides a number of the model."""

    def breaks(setting: Setting, c: Columns) -> Any:
        return (c.tp > 1) & (number(setting) % c.tp != 0)

    def because(setting: Setting, one: Candidate) -> str:
        whole = number(setting)
        fewer = f"; there are fewer {what} than tp ranks" if whole < one.tp else ""
        return f"tp {one.tp} does not divide the {whole:,} {what} ({whole} % {one.tp} = {whole % one.tp}){fewer}."

    return breaks, because


def _kv(setting: Setting) -> int:
    return setting.job.model.n_kv_heads


def _schedule_word(one: Candidate) -> str:
    chunks = f" with {one.chunks} chunks a stage" if one.chunks > 1 else ""
    return f"{SCHEDULES[one.schedule]}{chunks}"


def _misses_nodes(setting: Setting, c: Columns) -> Mask:
    group, node = c.dp_shard * c.cp * c.tp, setting.node
    aligned = (group % node == 0) | (node % np.maximum(group, 1) == 0)
    return np.asarray((c.dp_shard > 1) & (c.dp_replicate > 1) & ~aligned)


def _batch_fault(setting: Setting, one: Candidate, micro: int) -> BatchError:
    found: BatchError | None = None
    try:
        BatchPlan(setting.job.global_batch_size, micro, one.dp_replicate * one.dp_shard)
    except BatchError as error:
        found = error
    assert found is not None, f"{one.word} breaks no rule of the batch"
    return found


def _rule(name: str, text: str, tests: tuple[Any, Any], nearest: Callable[[Setting, Candidate], str]) -> Rule:
    return Rule(name, text, tests[0], tests[1], nearest)


RULES: Final[Sequence[Rule]] = (
    Rule(
        "devices",
        "A layout has at most as many ranks as the cluster has devices.",
        lambda setting, c: c.world_size > setting.num_devices,
        lambda setting, one: f"{one.word} has {one.world_size} ranks; the cluster has {setting.num_devices} devices.",
        world_near,
    ),
    Rule(
        "tp-known",
        "tp needs a model whose heads are known.",
        lambda setting, c: (c.tp > 1) & (setting.job.model.n_heads == 0),
        lambda setting, one: f"tp {one.tp} cuts heads, and this model does not say that it has any.",
        lambda setting, one: "Nearest: tp 1.",
    ),
    _rule(
        "tp-heads",
        "tp divides the query heads.",
        _tp_divides("query heads", lambda setting: setting.job.model.n_heads),
        tp_near,
    ),
    Rule(
        "tp-kv-heads",
        "tp divides the key and value heads, or they divide tp: then several ranks have the same one.",
        lambda setting, c: (
            (c.tp > 1) & (_kv(setting) % c.tp != 0) & ((_kv(setting) > c.tp) | (c.tp % max(_kv(setting), 1) != 0))
        ),
        lambda setting, one: (
            f"tp {one.tp} does not divide the {_kv(setting)} key and value heads ({_kv(setting)} % {one.tp} = "
            f"{_kv(setting) % one.tp}), nor do they divide it."
        ),
        tp_near,
    ),
    Rule(
        "tp-sequence",
        "Sequence parallelism cuts what cp leaves of a sample over the tp ranks.",
        lambda setting, c: (c.tp > 1) & (setting.job.seq_len % (c.tp * c.cp) != 0),
        lambda setting, one: (
            f"seq_len {setting.job.seq_len} / (tp {one.tp} x cp {one.cp}) is not a whole number of tokens."
        ),
        tp_near,
    ),
    Rule(
        "tp-node",
        "tp stays inside a node: its collectives run inside every layer.",
        lambda setting, c: (c.tp > setting.node) | (setting.node % c.tp != 0),
        lambda setting, one: (
            f"tp {one.tp} does not divide a node of {setting.node} devices, so its collectives inside every "
            "layer would cross nodes."
        ),
        node_near,
    ),
    Rule(
        "pp-layers",
        "Every chunk of a pipeline has at least one layer.",
        lambda setting, c: (c.pp > 1) & (c.pp * c.chunks > setting.job.model.n_layers),
        lambda setting, one: (
            f"pp {one.pp}{f' x {one.chunks} chunks' if one.chunks > 1 else ''} = {one.pp * one.chunks} parts, and the "
            f"model has {setting.job.model.n_layers} layers."
        ),
        layers_near,
    ),
    Rule(
        "ep-experts",
        "ep divides the experts of a layer.",
        lambda setting, c: (
            (c.ep > 1) & ((setting.job.model.n_experts % c.ep != 0) | (setting.job.model.n_experts == 0))
        ),
        lambda setting, one: f"ep {one.ep} does not divide the {setting.job.model.n_experts} experts of a layer.",
        experts_near,
    ),
    Rule(
        "ep-ranks",
        "ep divides the ranks of a shard group, dp_shard x cp.",
        lambda setting, c: (c.ep > 1) & ((c.dp_shard * c.cp) % c.ep != 0),
        lambda setting, one: f"ep {one.ep} does not divide the {one.dp_shard * one.cp} ranks of dp_shard x cp.",
        expert_ranks_near,
    ),
    Rule(
        "cp-sequence",
        "2 x cp divides the sequence: each rank has an early and a late part, so that causal work is even.",
        lambda setting, c: (c.cp > 1) & (setting.job.seq_len % (2 * c.cp) != 0),
        lambda setting, one: f"2 x cp {one.cp} does not divide seq_len {setting.job.seq_len}.",
        sequence_near,
    ),
    Rule(
        "hsdp-nodes",
        "A shard group of HSDP fills whole nodes, or is a whole part of one.",
        _misses_nodes,
        lambda setting, one: (
            f"a shard group has dp_shard {one.dp_shard} x cp {one.cp} x tp {one.tp} = {one.dp_shard * one.cp * one.tp} "
            f"ranks, neither whole nodes of {setting.node} nor a whole part of one."
        ),
        hsdp_near,
    ),
    Rule(
        "optimizer-parts",
        "ZeRO needs an optimizer that updates parts of a parameter.",
        lambda setting, c: (c.zero_stage > 0) & (not setting.cuttable),
        lambda setting, one: (
            f"stage {one.zero_stage} leaves each rank some rows, and this optimizer needs whole matrices."
        ),
        lambda setting, one: f"Nearest: ddp{one.dp_replicate * one.dp_shard}, or the optimizer adamw.",
    ),
    Rule(
        "tp-optimizer",
        "tp needs an optimizer that updates each weight by itself.",
        lambda setting, c: (c.tp > 1) & (not setting.elementwise),
        lambda setting, one: f"tp {one.tp} leaves each rank a part of every matrix, and this optimizer needs more.",
        lambda setting, one: "Nearest: tp 1, or the optimizer adamw.",
    ),
    Rule(
        "batch",
        "The data-parallel ranks divide the global batch.",
        lambda setting, c: setting.job.global_batch_size % (c.dp_replicate * c.dp_shard) != 0,
        lambda setting, one: _batch_fault(setting, one, 1).rule,
        lambda setting, one: _batch_fault(setting, one, 1).nearest,
    ),
    Rule(
        "microbatch",
        "The microbatch divides what a data-parallel rank gets of the global batch.",
        lambda setting, c: setting.job.global_batch_size % (c.dp_replicate * c.dp_shard * c.microbatch_size) != 0,
        lambda setting, one: _batch_fault(setting, one, one.microbatch_size).rule,
        lambda setting, one: _batch_fault(setting, one, one.microbatch_size).nearest,
    ),
    Rule(
        "pp-microbatches",
        "1F1B needs at least as many microbatches as stages.",
        lambda setting, c: (c.pp > 1) & (c.schedule == ONE_F_ONE_B) & (c.num_microbatches < c.pp),
        lambda setting, one: (
            f"1f1b over {one.pp} stages needs at least {one.pp} microbatches; a rank has {one.num_microbatches}."
        ),
        stages_near,
    ),
    Rule(
        "pp-rounds",
        "Interleaved schedules need a multiple of pp microbatches.",
        lambda setting, c: (c.pp > 1) & np.isin(c.schedule, ROUNDS) & (c.num_microbatches % c.pp != 0),
        lambda setting, one: (
            f"{_schedule_word(one)} runs rounds of pp {one.pp} microbatches; {one.num_microbatches} is no multiple."
        ),
        rounds_near,
    ),
    Rule(
        "pp-sync",
        "A pipeline reduces gradients when its schedule is over.",
        lambda setting, c: (c.pp > 1) & (np.asarray(c.sync_every) == 1),
        lambda setting, one: f"sync is every with pp {one.pp}, whose gradients are summed at the end.",
        lambda setting, one: "Nearest: sync last, or pp 1.",
    ),
    Rule(
        "zero-bubble-zero3",
        "Zero-bubble schedules need weights that stay gathered between forward and backward.",
        lambda setting, c: (c.pp > 1) & np.isin(c.schedule, PARTED) & (c.zero_stage == 3),
        lambda setting, one: (
            f"{SCHEDULES[one.schedule]} splits backward in two, and weights that stage 3 frees in between give wrong "
            "gradients, without an error (torch 2.13)."
        ),
        lambda setting, one: "Nearest: zero_stage 1 or 2, or pp_schedule 1f1b.",
    ),
    Rule(
        "zero-bubble-recompute",
        "Zero-bubble schedules do not go with recompute.",
        lambda setting, c: (c.pp > 1) & np.isin(c.schedule, PARTED) & (np.asarray(c.recompute) > 0),
        lambda setting, one: (
            f"{SCHEDULES[one.schedule]} splits backward in two, and a block would be computed again for each of its "
            "weights."
        ),
        lambda setting, one: "Nearest: recompute none, or pp_schedule 1f1b or interleaved1f1b.",
    ),
)
"""In the order in which they are asked: the first that breaks is the one that is said."""

BY_NAME: Final[Mapping[str, Rule]] = {rule.name: rule for rule in RULES}
