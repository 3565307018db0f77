"""The terms of memory at each moment of a step, for one candidate or columns of many; see memory.py for the moments.

Terms that come and go are lists of parts, bytes x elements: summed they are the amount, printed they are the formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from meshwright.cost.candidate import V_SHAPED, Column
from meshwright.cost.logits import loss_bytes, loss_kept
from meshwright.cost.quantities import StageQuantities

MOMENTS: Final = ("forward", "logits", "loss", "backward", "backward_end", "reduction", "update")
TERMS: Final = (
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "gathered_parameters",
    "gradient_buffers",
    "logits_and_loss",
)
"""What the allocator is asked for; an estimate has `allocator` and `context` besides."""

EXACT_PIECE: Final = 1 << 22
"""Elements that exact mode squares at once, in two fp64 limbs (parallel/exact.py)."""

BUCKET_BYTES: Final = 25 * 2**20
"""Of gradients that a pipeline reduces at once (parallel/harvest.py)."""

Part = tuple[Column, Column]
"""Bytes of an element, and how many elements there are."""

Parts = Mapping[str, list[Part]]
"""By moment."""


def moment_terms(q: StageQuantities, transient: bool = False) -> dict[str, dict[str, Column]]:
    """Every term at every moment, in bytes.

    Args:
        q: counts of one kind of stage.
        transient: gradients are counted only where they really live.
    """
    parameters, optimizer = parameter_bytes(q), optimizer_bytes(q)
    gradients = gradients_by_moment(q, transient)
    kept, gathered, buffers = activation_bytes(q), gathered_parts(q), buffer_parts(q, transient)
    loss = loss_bytes(q)
    return {
        moment: {
            "parameters": parameters,
            "gradients": gradients[moment],
            "optimizer_state": optimizer,
            "activations": kept[moment],
            "gathered_parameters": summed(gathered[moment]),
            "gradient_buffers": summed(buffers[moment]),
            "logits_and_loss": loss[moment],
        }
        for moment in MOMENTS
    }


def summed(parts: list[Part]) -> Column:
    """Bytes of all parts."""
    return sum((each * count for each, count in parts), 0.0)


def _stage_is(q: StageQuantities, least: int) -> Column:
    return np.asarray(q.columns.zero_stage) >= least


def _accumulates(q: StageQuantities) -> Column:
    return np.asarray(q.columns.num_microbatches) > 1


def _sums_early(q: StageQuantities) -> Column:
    """Are there sums of gradients before the last forward pass of a step?"""
    return np.asarray(q.columns.num_microbatches) > q.in_flight


def _is_own(q: StageQuantities) -> bool:
    return q.job.states.cuts == "fsdp2"


def parameter_bytes(q: StageQuantities) -> Column:
    """Weights that stay: whole, or this rank's part."""
    states = q.job.states
    is_cut = _stage_is(q, 1 if _is_own(q) else 3)
    trained = np.where(is_cut, q.cut(trained_only=True), q.parameters - q.frozen)
    twin = q.twin / np.where(is_cut, q.shard_group, 1)
    frozen = states.frozen_bytes * q.frozen / np.where(is_cut, q.shard_group, 1)
    return states.parameter_bytes * (trained + twin) + frozen


def optimizer_bytes(q: StageQuantities) -> Column:
    """Moments and masters; none on the device where they are offloaded."""
    on_device = 1 - np.asarray(q.columns.offload)
    trained = np.where(_stage_is(q, 1), q.cut(trained_only=True), q.parameters - q.frozen)
    return q.job.states.optimizer_bytes * trained * on_device


def gradients_are_cut(q: StageQuantities) -> Column:
    """Do gradients wait for the optimizer in parts? FSDP2 cuts at every stage, once it reduces."""
    reduces_each = (np.asarray(q.columns.sync_every) == 1) | ~_accumulates(q)
    if _is_own(q):
        reduces_each = reduces_each | (np.asarray(q.columns.pp) > 1)  # what a pipeline sums whole is a buffer
    return _stage_is(q, 1 if _is_own(q) else 2) & reduces_each


def gradient_bytes(q: StageQuantities) -> Column:
    """Gradients that wait for the optimizer, all of them."""
    return q.job.states.gradient_bytes * np.where(
        gradients_are_cut(q), q.cut(trained_only=True), q.parameters - q.frozen
    )


def has_buckets(q: StageQuantities) -> Column:
    """Does DDP hold gradients in its buckets, which stay from step to step? Exact mode sums by itself."""
    c = q.columns
    reduces = (np.asarray(c.zero_stage) == 0) & (np.asarray(c.dp_replicate) > 1) & (not q.job.engine.exact)
    return reduces & ~q.harvests


def has_copies(q: StageQuantities) -> Column:
    """Do passes run on copies of whole weights in the compute type? Their gradients are converted at the very end."""
    narrow = q.job.engine.copies and q.job.engine.compute_bytes < q.job.states.parameter_bytes
    return (np.asarray(q.columns.zero_stage) == 0) & narrow & _is_own(q)


def gradients_by_moment(q: StageQuantities, transient: bool) -> dict[str, Column]:
    """Gradients at each moment: before the first backward pass of a step there are none."""
    exact, whole = q.job.engine.exact, ~_stage_is(q, 1)
    full = gradient_bytes(q) + second_bytes(q)
    if not transient:
        return dict.fromkeys(MOMENTS, full)
    waits = _accumulates(q) | has_buckets(q)
    early = full * waits
    # Exact sums of whole weights have their room from the first gradient on; others come one by one.
    begun = np.where(whole & exact, full, early)
    coming = q.job.states.gradient_bytes * np.maximum(q.parameters - q.frozen - q.block - q.embedding, 0.0)
    near_end = np.where(whole & ~waits & (not exact), coming * ~has_copies(q), np.where(has_copies(q), begun, full))
    # Of the only microbatch of a step, parts of the first block and of the root come behind; exact sums of the root
    # are there as soon as one of its parameters has a gradient.
    behind = q.job.states.gradient_bytes * (q.block + q.root * (not exact)) / q.shard_group
    near_end = np.where(~whole & ~_accumulates(q), np.maximum(near_end - behind, 0.0), near_end)
    # Exact sums in parts are back in the masters' type once they are whole.
    final_bytes = np.where(exact & ~whole, q.job.states.parameter_bytes, q.job.states.gradient_bytes)
    reduced = final_bytes * np.where(
        _stage_is(q, 1 if _is_own(q) else 2), q.cut(trained_only=True), q.parameters - q.frozen
    )
    # What stands for a tied table's second use lies in one buffer with the root's other parts, until all are dropped.
    reduced = reduced + final_bytes * q.twin / q.shard_group * (exact & ~whole & ~q.harvests)
    # A pipeline sums whole; with ZeRO these sums are a buffer, and parts come of them at the very end.
    staged, cut = q.harvests, _stage_is(q, 1)
    piped = np.where(cut, 0.0, full * _sums_early(q))
    early, begun = np.where(staged, piped, early), np.where(staged, piped, begun)
    near_end = np.where(staged, np.where(cut, 0.0, full * _accumulates(q)), near_end)
    later = {"backward": begun, "backward_end": near_end, "reduction": full, "update": reduced}
    return dict.fromkeys(MOMENTS, early) | later


def second_bytes(q: StageQuantities) -> Column:
    """Exact sums of what stands for a tied table's second use; of one microbatch they come at the very end."""
    counted = q.job.engine.exact & _stage_is(q, 1) & ~q.harvests & _accumulates(q)
    return q.job.states.gradient_bytes * q.twin / q.shard_group * counted


def gathered_parts(q: StageQuantities) -> Parts:
    """Weights in the compute type, whole: copies of data parallelism, or what ZeRO has gathered.

    Of stage 3 the root is gathered, and the block that computes; and a block as it came: the last one until the next
    comes, or the one that was fetched ahead. Stages 1 and 2 free block by block as the last backward pass leaves them.
    """
    engine, c, stage = q.job.engine, float(q.job.engine.compute_bytes), np.asarray(q.columns.zero_stage)
    keeps = (np.asarray(q.columns.pp) > 1) & engine.pipeline_keeps_gathered
    copies, whole = has_copies(q), (stage > 0) & (stage < 3) & _is_own(q)
    freed = (stage >= 3) & ~keeps
    held = q.parameters + q.twin
    every = held * (copies | whole | ((stage >= 3) & keeps))
    # Of a pipeline's chunks one computes, and frees block by block; the others are as their backward passes left them.
    frees = (stage >= 3) & keeps & engine.harvests
    resting = 1 - 1 / np.asarray(q.columns.chunks)

    # A forward pass that follows a backward pass finds its blocks gathered, and nothing comes while they are freed.
    def at(blocks: Column, twice: Column = 0.0) -> list[Part]:
        few = q.root + q.twin + blocks * q.block
        some = np.minimum(few, held) * freed
        fewer = np.maximum(held - few, 0.0) * (1 - resting) * frees
        return [(c, every - fewer), (c, some), (c, q.block * twice)]

    # In the first forward pass of a step the last block's weights are there twice: as they came, and in their places.
    twice = whole & ~_accumulates(q)
    leaves = whole & ~_accumulates(q) & (np.asarray(q.columns.pp) == 1)
    ending = [(c, every * ~leaves), (c, (q.root + q.block) * leaves), at(engine.gathered_blocks)[1]]
    between = max(engine.gathered_blocks - 1, 0.0)
    return {
        "forward": at(np.where(frees & _sums_early(q), 1.0, engine.gathered_blocks), twice),
        "logits": at(between, twice),
        "loss": at(between),
        "backward": at(engine.gathered_blocks),
        "backward_end": ending,
        "reduction": [(c, q.parameters * copies * ~q.harvests), (c, q.root * (freed | whole) * ~q.harvests),
                      (c, q.parameters * ((stage >= 3) & keeps & (not engine.harvests)))],
        "update": [],
    }  # fmt: skip


def activation_bytes(q: StageQuantities) -> dict[str, Column]:
    """What passes keep from forward to backward, and the working room of the block that computes."""
    passing, parted = passing_bytes(q), parted_bytes(q)
    all_kept = q.in_flight * q.kept_by_blocks + q.ends_kept + passing + parted["waiting"]
    none = 0.0 * q.kept_by_blocks
    staged, received = staged_bytes(q), q.harvests * (received_bytes(q) - turn_bytes(q))
    ending = q.kept_by_layer + q.working + staged  # without a pipeline, of the step's last microbatch
    return {
        "forward": all_kept - q.after_kept + q.forward_peak,
        "logits": all_kept - q.less_at_the_loss * q.kept_by_blocks,
        "loss": all_kept - q.less_at_the_loss * q.kept_by_blocks,
        "backward": all_kept - q.after_kept + np.maximum(q.working, parted["inputs"]),
        "backward_end": np.where(q.parts_backward, all_kept - q.after_kept + parted["weights"], ending),
        "reduction": none + q.stream * ~q.harvests + received,
        "update": none + received,
    }


def parted_bytes(q: StageQuantities) -> dict[str, Column]:
    """Where backward passes come in two: what those of inputs keep and make, beside what is kept from forward.

    waiting    of chunks that wait for their pass of weights while others run: r of them on rank r of
               interleaved-zero-bubble
    inputs     of the one whose pass of inputs runs, which frees nothing
    weights    of the one whose pass of weights runs; or zbv's 2 r + 1 at the end of a step, when nothing else is
               kept
    """
    c, parts = q.columns, q.parts_backward
    chunk, kept = q.parted_kept / np.asarray(c.chunks), q.kept_by_blocks / np.asarray(c.chunks)
    layer = q.parted_kept / np.maximum(q.content.layers, 1)
    is_v = np.asarray(c.schedule) == V_SHAPED
    last = 2 * q.pp_rank + 1
    at_the_end = np.where(is_v, last * (kept + chunk) - q.in_flight * q.kept_by_blocks, 0.0)
    return {
        "waiting": np.where(parts & ~is_v, q.waiting * q.parted_kept, 0.0),
        "inputs": np.where(parts, chunk - layer + q.parted_peak, 0.0),
        "weights": np.where(parts, np.maximum(chunk, at_the_end), 0.0),
    }


def staged_bytes(q: StageQuantities) -> Column:
    """What a pipeline holds of other microbatches as the first backward pass ends that adds to sums."""
    before = q.in_flight - np.where(_sums_early(q), 1, 2)
    others = np.maximum(before, 0) * (q.kept_by_blocks + q.bytes_of(q.job.model.before) * q.has_first)
    others = others + np.maximum(q.head_in_flight - 2, 0) * (q.after_kept + loss_kept(q))
    return q.harvests * (others + passing_bytes(q))


def passing_bytes(q: StageQuantities) -> Column:
    """What a pipeline stage holds of its neighbours' microbatches: receive buffers both ways, and its own outputs."""
    engine, c = q.job.engine, q.columns
    is_cut = np.asarray(c.pp) > 1
    if engine.harvests:
        # What was received is what the first block of a chunk keeps: its buffer is counted, so its input is not.
        # So is an output until its backward pass, which the last chunk has none of.
        kept = q.in_flight * q.stream * (q.has_first - q.has_last)
        return np.where(is_cut, received_bytes(q) - turn_bytes(q) + kept + returning_bytes(q) + sent_bytes(q), 0.0)
    received = 2 * c.num_microbatches * c.chunks * q.stream if engine.receives_all else 2 * q.stream
    sent = q.in_flight * q.stream * (1 - q.has_last) if engine.keeps_outputs else 0.0
    return np.where(is_cut, received + sent, 0.0)


def sent_bytes(q: StageQuantities) -> Column:
    """What a rank of several stages has sent, or handed on, of microbatches that are over: torch holds it for the step.

    torch.distributed.pipelining, schedules.py: `_PipelineScheduleRuntime._step_microbatches` waits for sends at last.
    """
    over = np.maximum(q.columns.num_microbatches - q.in_flight, 0) / np.maximum(q.columns.num_microbatches, 1)
    return np.where(np.asarray(q.columns.chunks) > 1, received_bytes(q) * over, 0.0)


def turn_bytes(q: StageQuantities) -> Column:
    """Of what is received, where a V turns: it goes from one stage to the next in place, and no buffer waits for it."""
    c = q.columns
    turns = (np.asarray(c.pp) > 1) & (np.asarray(c.schedule) == V_SHAPED) & q.is_last
    return turns * 2.0 * c.num_microbatches * q.stream


def returning_bytes(q: StageQuantities) -> Column:
    """The gradient of a microbatch's input that is on its way back while the next one's forward pass runs."""
    has_before = (np.asarray(q.columns.chunks) > 1) | (q.has_first == 0)
    return q.harvests * q.stream * (has_before & _sums_early(q))


def received_bytes(q: StageQuantities) -> Column:
    """Buffers for what comes from the neighbours of each chunk, forward and back: one for each microbatch, for good.

    torch.distributed.pipelining, stage.py: `_prepare_forward_infra` and `_prepare_backward_infra`.
    """
    c = q.columns
    ways = 2 * c.chunks - q.has_first - q.has_last
    return np.where(np.asarray(c.pp) > 1, ways * c.num_microbatches * q.stream, 0.0)


def waiting_part(q: StageQuantities) -> Part:
    """Gradients that a pipeline sums whole until the last microbatch, where ZeRO holds parts from step to step.

    Interleaved, a chunk's gradients are reduced before the next chunk's begin, if no chunk waits for more microbatches.
    """
    engine, c = q.job.engine, q.columns
    waits = (np.asarray(c.pp) > 1) & engine.pipeline_keeps_gathered & _stage_is(q, 1)
    at_once = np.where((np.asarray(c.num_microbatches) <= c.pp) & (not engine.harvests), c.chunks, 1)
    return engine.reduce_bytes, (q.parameters - q.frozen) / at_once * waits


def left_over_part(q: StageQuantities) -> Part:
    """The root's reduce-scatter input, which FSDP2 holds from one microbatch's backward pass to the next one's."""
    engine, c = q.job.engine, q.columns
    again = _accumulates(q) & (np.asarray(c.sync_every) == 1) & (np.asarray(c.pp) == 1)
    return engine.reduce_bytes, (q.root + q.twin) * (again & _stage_is(q, 1) & engine.keeps_last_reduction)


def unviewed_part(q: StageQuantities) -> Part:
    """Gradients of microbatches that DDP does not reduce: they lie beside its buckets until the last one."""
    waits = has_buckets(q) & _accumulates(q) & (np.asarray(q.columns.sync_every) == 0) & _is_own(q)
    return q.job.states.gradient_bytes, (q.parameters - q.frozen) * waits


def head_part(q: StageQuantities, transient: bool) -> Part:
    """The head's gradient, which waits for the end: in ZeRO's root, in a tied table, in copies."""
    arrives = transient & ~_accumulates(q) & (not q.job.engine.exact)
    waits = _stage_is(q, 1) | has_copies(q) | (q.job.model.tied & _is_own(q)) | (arrives & ~has_buckets(q))
    return float(q.job.engine.compute_bytes), q.head * waits


def buffer_parts(q: StageQuantities, transient: bool) -> Parts:
    """Gradients on their way: of the block that computes, of reductions, of the root, which is reduced at the end."""
    engine, c, is_cut = q.job.engine, float(q.job.engine.compute_bytes), _stage_is(q, 1)
    moving = engine.reduce_bytes * engine.reduce_blocks
    buckets: Part = (engine.bucket_bytes, q.parameters * (np.asarray(q.columns.dp_replicate) > 1))
    waiting, head = waiting_part(q), head_part(q, transient)
    soon = (waiting[0], waiting[1] * (_sums_early(q) | (not engine.harvests)))
    early = [buckets, soon, left_over_part(q), unviewed_part(q)]
    # Of the last block nothing is reduced yet; of the one before it is, but the last one's activations are gone then.
    behind = np.maximum(moving - q.kept_by_layer / np.maximum(q.block, 1), 0.0)
    fresh = np.maximum(q.block - q.working / c, 0.0)  # a block's own gradients come as its working room goes
    converted = (q.parameters - q.frozen - q.block) * has_copies(q)
    staged = q.harvests
    still = (is_cut | q.job.model.tied) & ~has_copies(q)
    summed_before = (waiting[0], waiting[1] * (_accumulates(q) | (not engine.harvests)))
    # A chunk's own gradients: of one microbatch they become the sums; else each is added as soon as it is there, but
    # for those of passes of weights, which wait for the end of theirs.
    made = (q.parameters - q.frozen + q.twin) / np.asarray(q.columns.chunks) - _still_to_come(q)
    own = (c, np.maximum(made, 0.0) * (staged & (q.parts_backward | ~_accumulates(q))))
    at_end = [buckets, summed_before, own, (c, converted * ~staged), (head[0], head[1] * still * ~staged)]
    moving_on = q.block * (is_cut & ~staged)
    joins = staged & ((np.asarray(q.columns.dp_replicate) > 1) | (np.asarray(q.columns.dp_shard) > 1))
    together = np.minimum(q.parameters, np.maximum(BUCKET_BYTES / max(engine.reduce_bytes, 1.0), q.largest))
    # The sums of a bucket go when it is made: on gloo the copy that it works on comes in their room.
    bucket = together * joins
    ends = tied_ends(q) / q.shard_group * staged  # summed once the buckets have been
    return {
        "forward": early,
        "logits": early,
        "loss": early,
        "backward": [*early, head, (behind, moving_on), (c, fresh * is_cut)],
        "backward_end": [*at_end, (moving, moving_on), (c, fresh * (is_cut & ~staged))],
        "reduction": [
            buckets,
            waiting,
            (c + engine.reduce_bytes, q.root * (is_cut & ~staged)),
            (engine.reduce_bytes, np.maximum(bucket, ends)),
        ],
        "update": [update_part(q)],
    }


def tied_ends(q: StageQuantities) -> Column:
    """Parameters of a table that another rank of the pipeline has too; the stages of a V have both on one."""
    c, model = q.columns, q.job.model
    apart = (np.asarray(c.pp) > 1) & (np.asarray(c.schedule) != V_SHAPED) & (q.is_first | q.is_last)
    return model.embedding_parameters / c.tp * (apart & model.tied)


def _still_to_come(q: StageQuantities) -> Column:
    """Gradients that a stage's first block has yet to make while it needs the most room; its room goes as they come."""
    room = np.maximum(q.kept_by_layer + q.working - q.stream, 0.0) / float(q.job.engine.compute_bytes)
    return np.where(q.parts_backward, 0.0, np.minimum(q.block + q.embedding, room))


def update_part(q: StageQuantities) -> Part:
    """Working room of clipping and optimizer; exact sums become masters' gradients, and are squared piece by piece."""
    engine = q.job.engine
    if not engine.exact:
        return engine.update_bytes, q.cut(trained_only=True)
    is_cut = _stage_is(q, 1)
    largest = np.minimum(q.largest / q.shard_group, EXACT_PIECE)
    return np.where(is_cut, 16.0, 4.0), np.where(is_cut, largest, q.parameters - q.frozen)
