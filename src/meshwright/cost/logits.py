"""Memory of logits and cross-entropy, moment by moment, for one candidate or columns of many; see memory.py."""

from __future__ import annotations

from typing import Final

import numpy as np

from meshwright.cost.candidate import SCHEDULES, V_SHAPED, Column
from meshwright.cost.quantities import StageQuantities
from meshwright.spec.model_spec import Bytes

ONE_F_ONE_B: Final = SCHEDULES.index("1f1b")


def loss_bytes(q: StageQuantities) -> dict[str, Column]:
    """Logits and cross-entropy; of microbatches in flight, what they keep."""
    waiting = (q.head_in_flight - 1) * loss_kept(q)
    if q.job.engine.keeps_logits:
        logits = Bytes(inner=float(q.job.engine.compute_bytes * q.job.model.vocab_size))
        is_cut = np.asarray(q.columns.pp) > 1
        waiting = waiting + is_cut * q.columns.num_microbatches * q.bytes_of(logits) * q.has_last
    none, now, parted = 0.0 * waiting, loss_now(q), parted_loss(q)
    rows = {moment: waiting + now.get(moment, none) for moment in ("forward", "logits", "loss", "backward")}
    rows |= dict.fromkeys(("backward_end", "reduction", "update"), none)
    return {moment: row + parted.get(moment, none) for moment, row in rows.items()}


def parted_loss(q: StageQuantities) -> dict[str, Column]:
    """Where backward passes come in two: gradients of logits that wait for the head's pass of weights.

    As many as `terms.parted_bytes` says of chunks; and what the loss keeps, which the pass of inputs does not free.
    """
    narrow, is_v = _logits(q), np.asarray(q.columns.schedule) == V_SHAPED
    waiting = narrow * np.where(q.parts_backward & ~is_v, q.pp_rank, 0)
    own = narrow * q.parts_backward
    rows = dict.fromkeys(("forward", "logits", "loss"), waiting)
    return rows | {"backward": waiting + own + q.loss("loss_kept") * q.parts_backward, "backward_end": waiting + own}


def loss_now(q: StageQuantities) -> dict[str, Column]:
    """Logits and cross-entropy of the microbatch that is at them.

    Cut over tp, backward makes the gradient beside the softmax that forward has kept, and nothing else
    (parallel/tensor_loss.py).
    """
    is_parted = (np.asarray(q.columns.tp) > 1) & q.job.engine.harvests
    peak, output = np.where(is_parted, 2 * _wide_logits(q), q.loss("loss_peak")), outputs_bytes(q)
    forward = np.maximum(q.loss("loss_forward"), _beside_the_last(q))
    return {"logits": forward, "loss": peak + output, "backward": output}


def _beside_the_last(q: StageQuantities) -> Column:
    """New logits, as they are and cast, beside those of the microbatch before, which torch's 1F1B lets go by then."""
    c = q.columns
    one_by_one = (np.asarray(c.pp) > 1) & (np.asarray(c.schedule) == ONE_F_ONE_B) & q.job.engine.harvests
    follows = one_by_one & (np.asarray(c.num_microbatches) > 1)
    return follows * (2 * _wide_logits(q) + _logits(q) * (q.job.engine.compute_bytes < 4))


def _logits(q: StageQuantities) -> Column:
    return q.bytes_of(Bytes(inner=float(q.job.engine.compute_bytes * q.job.model.vocab_size))) * q.has_last


def loss_kept(q: StageQuantities) -> Column:
    """What a microbatch keeps for the backward pass of its loss."""
    return q.loss("loss_kept") + outputs_bytes(q)


def outputs_bytes(q: StageQuantities) -> Column:
    """Logits, in fp32 or wider, that a pipeline's last stage holds until a microbatch's backward pass is over."""
    staged = (np.asarray(q.columns.pp) > 1) & q.job.engine.harvests
    return staged * _wide_logits(q)


def _wide_logits(q: StageQuantities) -> Column:
    wide = max(q.job.engine.compute_bytes, 4)
    return q.bytes_of(Bytes(inner=float(wide * q.job.model.vocab_size))) * q.has_last
