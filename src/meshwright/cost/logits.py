"""Memory of logits and cross-entropy, moment by moment, for one candidate or columns of many; see memory.py."""

from __future__ import annotations

import numpy as np

from meshwright.cost.candidate import Column
from meshwright.cost.quantities import StageQuantities
from meshwright.spec.model_spec import Bytes


def loss_bytes(q: StageQuantities) -> dict[str, Column]:
    """Logits and cross-entropy; of microbatches in flight, what they keep."""
    waiting = (q.head_in_flight - 1) * loss_kept(q)
    if q.job.engine.keeps_logits:
        logits = Bytes(inner=float(q.job.engine.compute_bytes * q.job.model.vocab_size))
        is_cut = np.asarray(q.columns.pp) > 1
        waiting = waiting + is_cut * q.columns.num_microbatches * q.bytes_of(logits) * q.has_last
    none, now = 0.0 * waiting, loss_now(q)
    rows = {moment: waiting + now.get(moment, none) for moment in ("forward", "logits", "loss", "backward")}
    return rows | dict.fromkeys(("backward_end", "reduction", "update"), none)


def loss_now(q: StageQuantities) -> dict[str, Column]:
    """Logits and cross-entropy of the microbatch that is at them.

    Cut over tp, backward makes the gradient beside the softmax that forward has kept, and nothing else
    (parallel/tensor_loss.py).
    """
    is_parted = (np.asarray(q.columns.tp) > 1) & q.job.engine.harvests
    peak, output = np.where(is_parted, 2 * _wide_logits(q), q.loss("loss_peak")), outputs_bytes(q)
    return {"logits": q.loss("loss_forward"), "loss": peak + output, "backward": output}


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
