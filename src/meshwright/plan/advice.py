"""What else a user wants to know about a choice: how far it could go, and what it does to batch and learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Final

import numpy as np

from meshwright.cost.candidate import SCHEDULES, Candidate, Columns
from meshwright.cost.memory import estimate
from meshwright.cost.stages import spans_of_ranks, weights_of
from meshwright.plan.rules import first_broken
from meshwright.plan.setting import Setting
from meshwright.spec.batch import BatchPlan
from meshwright.spec.model_spec import ModelSpec
from meshwright.spec.nearest import divisors

MOST_SEQ_LEN: Final = 1 << 22
"""Where neither the model nor memory limits a sequence, nobody needs to know more."""

LONGEST_LIST: Final = 4096
LONGEST_RUNS: Final = 5


def largest_microbatch(setting: Setting, one: Candidate) -> int:
    """The largest microbatch_size that fits with everything else as it is.

    Args:
        setting: the model, the batch and the cluster.
        one: a candidate that fits.
    """
    share = setting.job.global_batch_size // (one.dp_replicate * one.dp_shard)
    sizes = np.array(divisors(share)[:LONGEST_LIST], dtype=np.int64)
    columns = _like(one, microbatch_size=sizes, num_microbatches=share // sizes)
    works = (first_broken(setting, columns) == 0) & (estimate(setting.job, columns).fits > 0)
    return int(sizes[works].max(initial=one.microbatch_size))


def largest_seq_len(setting: Setting, one: Candidate, model_at: Callable[[int], ModelSpec]) -> int:
    """The longest sequence that fits with everything else as it is, in whole steps of 1024 tokens if it is that long.

    Args:
        setting: the model, the batch and the cluster.
        one: a candidate that fits.
        model_at: the model for a sequence length.
    """
    step, now = _step(setting, one), setting.job.seq_len
    limit = (setting.job.model.max_seq_len or MOST_SEQ_LEN) // step
    low, high = now // step, max(now // step, 1)
    while high < limit and _fits(setting, one, model_at, high * step):
        low, high = high, min(2 * high, limit)
    if high <= limit and _fits(setting, one, model_at, high * step):
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(setting, one, model_at, middle * step) else (low, middle)
    return max(low * step, now)


def _step(setting: Setting, one: Candidate) -> int:
    """What a sequence grows by: whole parts for tp and cp, and round numbers."""
    parts = one.tp * 2 * one.cp
    rough = 1024 if setting.job.seq_len >= 1024 else 64 if setting.job.seq_len >= 64 else 1
    return int(np.lcm(parts, rough)) if one.tp * one.cp > 1 else rough


def _fits(setting: Setting, one: Candidate, model_at: Callable[[int], ModelSpec], seq_len: int) -> bool:
    job = replace(setting.job, model=model_at(seq_len))
    return bool(estimate(job, one).fits[0] > 0)


def _like(one: Candidate, **columns: np.ndarray) -> Columns:
    """Columns of one candidate, some of them replaced."""
    values = {name: getattr(one, name) for name in Columns.__slots__}
    return Columns(**(values | columns))


def batch_line(setting: Setting, one: Candidate) -> str:
    """The batch identity with its numbers, in the words that `train` prints."""
    ranks = one.dp_replicate * one.dp_shard
    plan = BatchPlan(setting.job.global_batch_size, one.microbatch_size, ranks)
    many = plan.num_microbatches
    parts = (
        f"{ranks:,} rank{'s' if ranks > 1 else ''}",
        f"{many:,} microbatch{'es' if many > 1 else ''}",
        f"{plan.microbatch_size:,} sample{'s' if plan.microbatch_size > 1 else ''}",
    )
    tokens = setting.job.global_batch_size * setting.job.seq_len
    return f"batch: {setting.job.global_batch_size:,} samples a step = {' x '.join(parts)}; {tokens:,} tokens"


def notes(setting: Setting, one: Candidate) -> tuple[str, ...]:
    """What is legal and worth a line: uneven stages, a vocabulary that TP pads."""
    model, found = setting.job.model, []
    if one.pp > 1:
        found += _stage_line(model, one)
    if one.tp > 1 and model.vocab_size % one.tp:
        most = -(-model.vocab_size // one.tp)
        found.append(f"vocabulary: {model.vocab_size:,} rows do not divide by tp {one.tp}: a rank has up to {most:,}")
    if one.tp > model.n_kv_heads > 0:
        many = one.tp // model.n_kv_heads
        found.append(f"heads: {model.n_kv_heads} of keys and values, fewer than tp {one.tp}: {many} ranks have each")
    return tuple(found)


def _stage_line(model: ModelSpec, one: Candidate) -> list[str]:
    """The layers of each rank, where they are not all alike."""
    spans = spans_of_ranks(weights_of(model), one.pp, one.chunks, SCHEDULES[one.schedule] == "zbv")
    counts = [sum(map(len, mine)) for mine in spans]
    if min(counts) == max(counts):
        return []
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    told = ", ".join(f"{count} on {'1 rank' if many == 1 else f'{many} ranks'}" for count, many in runs[:LONGEST_RUNS])
    rest = ", ..." if len(runs) > LONGEST_RUNS else ""
    return [f"layers: {model.n_layers} over pp {one.pp}, by cost with the head's: {told}{rest}"]
