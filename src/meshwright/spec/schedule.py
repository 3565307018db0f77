"""The learning rate as a pure function of the optimizer step: nothing to save, and no process count in it."""

from __future__ import annotations

import math

from meshwright.spec.sections import ScheduleSection


def lr_multiplier(schedule: ScheduleSection, steps: int, update: int) -> float:
    """Factor on the peak rate, 0 to 1, that stands after `update` optimizer updates.

    With w = warmup_steps, f = final_fraction and p = (update - w) / (steps - w), after the warm-up:

        warm-up     (update + 1) / w        while update < w, so the first step does not run at 0
        constant    1
        linear      1 - (1 - f) p
        cosine      f + (1 - f) (1 + cos(pi p)) / 2
        wsd         1, then linear to f over the last decay_steps

    Args:
        schedule: the shape.
        steps: optimizer updates of the whole training, >= 1; microbatches and ranks do not count.
        update: 0 for the first optimizer step; past `steps` the last value stands.

    Source: cosine: Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5, without restarts. wsd: Hu et al. 2024,
    arXiv 2404.06395, section 4.
    """
    assert steps >= 1 and update >= 0, f"update {update} of {steps}"
    warmup, final = schedule.warmup_steps, schedule.final_fraction
    if update < warmup:
        return (update + 1) / warmup
    match schedule.name:
        case "linear":
            return 1.0 - (1.0 - final) * _progress(update, warmup, steps)
        case "cosine":
            return final + (1.0 - final) * (1.0 + math.cos(math.pi * _progress(update, warmup, steps))) / 2.0
        case "wsd":
            start = steps - decay_steps(schedule, steps)
            return 1.0 - (1.0 - final) * _progress(update, start, steps)
        case _:
            return 1.0


def _progress(update: int, start: int, end: int) -> float:
    """Share of start .. end that is done, 0 to 1; an empty stretch is done at once."""
    return min(max((update - start) / (end - start), 0.0), 1.0) if end > start else 1.0


def decay_steps(schedule: ScheduleSection, steps: int) -> int:
    """Steps of wsd's final decay: as given, else a tenth of `steps`, at least 1."""
    return schedule.decay_steps if schedule.decay_steps is not None else max(1, steps // 10)
