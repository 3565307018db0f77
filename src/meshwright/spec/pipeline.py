"""Pipeline schedules as words and numbers: which microbatches they take, and how long their ranks wait. No torch.

    gpipe                    all forward passes, then all backward passes
    1f1b                     each backward pass as soon as it can be
    interleaved1f1b          1f1b with several stages (chunks) on a rank
    interleaved-zero-bubble  the same; backward passes come in two, inputs first, weights where a rank would wait
    zbv                      in two as well, on a V: rank r has stages r and 2 pp - 1 - r

The idle share is the share of a step in which a rank waits, all ranks together, if every layer takes as long as every
other and nothing is sent: (time - work) / time. With m microbatches and v chunks

    gpipe, 1f1b              (pp - 1) / (m + pp - 1)           Huang et al., arXiv 1811.06965
    interleaved1f1b          (pp - 1) / (v m + pp - 1)         Narayanan et al., arXiv 2104.04473, section 2.2
    the other two            no closed form fits what is really run: the schedule is played (spec/pipeline_play.py)
"""

from __future__ import annotations

from typing import Final

from meshwright.errors import Fault
from meshwright.spec.nearest import around, divisors, listed, multiples_around
from meshwright.spec.pipeline_play import played_idle_share
from meshwright.spec.sections import PP_SCHEDULES

SPLIT: Final = ("interleaved-zero-bubble", "zbv")
"""Backward passes come in two: of inputs, and later of weights."""

ROUNDS: Final = ("interleaved1f1b", "interleaved-zero-bubble")
"""Microbatches go in rounds of pp."""

INTERLEAVED: Final = (*ROUNDS, "zbv")
"""A rank has several stages."""


def takes(schedule: str, pp: int, num_microbatches: int) -> bool:
    """Does a schedule run so many microbatches over so many ranks?

    1f1b keeps pp - r of them on rank r, so it needs pp; rounds have pp each; the others take any number.
    """
    if schedule == "1f1b":
        return num_microbatches >= pp
    return num_microbatches % pp == 0 if schedule in ROUNDS else num_microbatches >= 1


def microbatch_fault(schedule: str, pp: int, num_microbatches: int, samples: int) -> Fault | None:
    """Why a schedule does not take the microbatches of a step; None if it does.

    Args:
        schedule: its word.
        pp: ranks of the pipeline.
        num_microbatches: of a step on one data-parallel rank.
        samples: of a step on one data-parallel rank.
    """
    if takes(schedule, pp, num_microbatches):
        return None
    legal = [size for size in divisors(samples) if takes(schedule, pp, samples // size)]
    size = samples // num_microbatches
    sizes = [f"batch.microbatch_size {listed(around(size, legal))}"] if legal else []
    counts = [pp] if schedule == "1f1b" else multiples_around(num_microbatches, pp)
    wanted = f"{listed(counts)} microbatches on each data-parallel rank"
    needs = f"at least pp {pp}" if schedule == "1f1b" else f"rounds of pp {pp}"
    rule = f"is {schedule}, which needs {needs} microbatches; a rank has {num_microbatches}."
    near = "; ".join([*sizes, wanted, "gpipe, which takes any number"])
    return Fault("layout.pp_schedule", rule, f"Nearest: {near}.")


def recompute_fault(schedule: str, recompute: str) -> Fault | None:
    """Why a schedule does not go with a recompute mode; None if it does.

    torch.autograd runs the pass of weights once for each of a block's weights, and torch.utils.checkpoint computes the
    block again in each of these (torch 2.13: 10 times in all for a Llama block; `selective` fails).

    Args:
        schedule: its word.
        recompute: none | selective | full.
    """
    if schedule not in SPLIT or recompute == "none":
        return None
    rule = f"is {recompute} with layout.pp_schedule {schedule}: its backward passes come in two, inputs and weights, "
    rule += "and a block would be computed again for each of its weights."
    return Fault("train.recompute", rule, 'Nearest: "none", or layout.pp_schedule 1f1b or interleaved1f1b.')


def idle_share(schedule: str, pp: int, chunks: int, num_microbatches: int) -> float:
    """The share of a step in which a rank waits, 0 to 1, where forward, input and weight passes take equally long.

    Args:
        schedule: one of PP_SCHEDULES.
        pp: ranks of the pipeline.
        chunks: stages of a rank.
        num_microbatches: of a step on one data-parallel rank.
    """
    assert schedule in PP_SCHEDULES, schedule
    if pp == 1:
        return 0.0
    if schedule in SPLIT:
        return played_idle_share(schedule, pp, chunks, num_microbatches)
    slots = num_microbatches * (chunks if schedule in INTERLEAVED else 1)
    return (pp - 1) / (slots + pp - 1)


def idle_formula(schedule: str, pp: int, chunks: int, num_microbatches: int) -> str:
    """The idle share with its numbers in, as explanations have it."""
    if schedule in SPLIT:
        return f"{schedule} of {pp} ranks x {chunks} chunks x {num_microbatches} microbatches, played pass by pass"
    slots = f"{chunks} x {num_microbatches}" if schedule in INTERLEAVED else f"{num_microbatches}"
    return f"({pp} - 1) / ({slots} + {pp} - 1)"
