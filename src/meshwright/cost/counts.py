"""How many collectives one rank joins in an optimizer step, by axis and kind, to be counted in a run of meshwright.

With m microbatches, L layers on the rank, u units of ZeRO (layers, and what is in none), p = 2 with recompute, else 1:

    data       ddp                  one all-reduce a bucket: see BUCKET_BYTES
               zero1, zero2         u all-gathers; u reduce-scatters, or m u with sync = every
               zero3                2 m L + m all-gathers (what is in no layer stays until its backward pass)
    replicas   hsdp                 u all-reduces
    tensor     a layer              2 p all-gathers and 2 p reduce-scatters forward, 2 and 2 back, for each microbatch;
                                    recompute ends with what backward needs: without dropout it leaves out the last one
               embedding            1 reduce-scatter forward, 1 all-gather back; head: the other way round
               loss                 2 all-reduces of a row's numbers; the third that Megatron-LM makes is one with them
               norms, shared heads  1 all-reduce a step for each number of ranks that have the same
    pipeline   a boundary           1 send and 1 receive each way for each microbatch, if it lies between ranks
               zero1, zero2         1 all-gather for each unit; zero3: m + 1 for a layer, whatever the schedule's order
               gradients            1 all-reduce (ddp) or reduce-scatter (ZeRO) a bucket, at the end; hsdp both
    ends       a tied table         1 all-reduce, if the first and the last stage are on two ranks

Norms of gradients, flags and losses are a few numbers a step and are not counted here. Sources: parallel/fsdp.py,
harvest.py, kin.py, tensor_moves.py and tensor_loss.py; Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from meshwright.cost.candidate import RECOMPUTE, SCHEDULES, Candidate
from meshwright.cost.quantities import Job, StageQuantities
from meshwright.spec.stage_cut import rank_of, stages_of

BUCKET_BYTES: Final = 25 * 2**20
"""Of gradients that go together; DDP's first bucket has 1 MiB. A bucket ends with the parameter that fills it."""

Counts = dict[str, dict[str, int]]
"""By axis, then by kind: all_gather, reduce_scatter, all_reduce, send, receive."""


def counts(job: Job, candidate: Candidate, rank: int = 0) -> Counts:
    """Collectives of one rank in a step, by axis; axes and kinds without any are left out.

    Args:
        job: with meshwright's own engine.
        candidate: one layout with its knobs; no cp, ep or offload.
        rank: of the pipeline, 0 .. pp - 1.
    """
    q = StageQuantities(job, candidate, rank)
    found = {
        "data": _data(q, candidate),
        "replicas": _replicas(q, candidate),
        "tensor": _tensor(q, candidate),
        "pipeline": _pipeline(candidate, rank),
        "ends": _ends(q, candidate, rank),
    }
    kept = {axis: {kind: many for kind, many in kinds.items() if many} for axis, kinds in found.items()}
    return {axis: kinds for axis, kinds in kept.items() if kinds}


def num_buckets(gradient_bytes: float) -> int:
    """Buckets of so many bytes, if no parameter is larger than one; the least that there can be."""
    return max(1, int(gradient_bytes // BUCKET_BYTES))


def _roots(q: StageQuantities) -> int:
    """Units that are no layer: a model's own, or of the chunks with embedding or head one each."""
    if q.columns.pp == 1:
        return int(q.job.model.root_parameters > 0)
    return int(q.has_first) * int(q.job.model.embedding_parameters > 0) + int(q.has_last)


def _data(q: StageQuantities, one: Candidate) -> Mapping[str, int]:
    layers, m = int(q.content.layers), one.num_microbatches
    buckets = num_buckets(q.job.engine.reduce_bytes * float(q.parameters - q.frozen))
    if one.zero_stage == 0:
        again = m if one.sync_every and one.pp == 1 else 1
        return {"all_reduce": buckets * again} if one.dp_replicate > 1 else {}
    roots = _roots(q)
    if one.pp > 1:
        gathers = m + 1 if one.zero_stage == 3 else 1
        return {"all_gather": layers * gathers + roots, "reduce_scatter": buckets}
    gathers, of_root = (2 * m, m) if one.zero_stage == 3 else (1, 1)
    return {
        "all_gather": layers * gathers + roots * of_root,
        "reduce_scatter": (layers + roots) * (m if one.sync_every else 1),
    }


def _replicas(q: StageQuantities, one: Candidate) -> Mapping[str, int]:
    if one.zero_stage == 0 or one.dp_replicate == 1:
        return {}
    buckets = num_buckets(q.job.engine.reduce_bytes * float(q.parameters - q.frozen))
    return {"all_reduce": buckets if one.pp > 1 else int(q.content.layers) + _roots(q)}


def _tensor(q: StageQuantities, one: Candidate) -> Mapping[str, int]:
    if one.tp == 1:
        return {}
    layers, first, last, model = int(q.content.layers), int(q.has_first), int(q.has_last), q.job.model
    again = int(one.recompute != RECOMPUTE.index("none"))
    drops = bool(model.architecture.get("dropout"))
    gathers = layers * (2 + 2 * again + 2) + first + last
    scatters = layers * (2 + (1 + drops) * again + 2) + first + last
    groups = 2 if 1 < model.n_kv_heads < one.tp else 1
    sums = 2 * last * one.num_microbatches + groups
    m = one.num_microbatches
    return {"all_gather": gathers * m, "reduce_scatter": scatters * m, "all_reduce": sums}


def _pipeline(one: Candidate, rank: int) -> Mapping[str, int]:
    if one.pp == 1:
        return {}
    schedule, last = SCHEDULES[one.schedule], one.pp * one.chunks - 1
    mine = stages_of(rank, one.pp, one.chunks, schedule)
    away = [rank_of(stage + 1, one.pp, schedule) != rank for stage in mine if stage < last]  # forward out, back in
    near = [rank_of(stage - 1, one.pp, schedule) != rank for stage in mine if stage > 0]  # forward in, back out
    passed = (sum(away) + sum(near)) * one.num_microbatches
    return {"send": passed, "receive": passed}


def _ends(q: StageQuantities, one: Candidate, rank: int) -> Mapping[str, int]:
    apart = one.pp > 1 and SCHEDULES[one.schedule] != "zbv"
    return {"all_reduce": 1} if q.job.model.tied and apart and rank in (0, one.pp - 1) else {}
