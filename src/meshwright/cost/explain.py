"""The memory of one candidate in words: the terms of its fullest moment, each with its formula, numbers in.

A formula is arithmetic that can be evaluated, and tests/cost/test_memory.py does: words and numbers cannot drift.
"""

from __future__ import annotations

import math
from typing import Final, Literal

from meshwright.cost.candidate import RECOMPUTE, SCHEDULES, Candidate
from meshwright.cost.logits import loss_kept, loss_now, parted_loss
from meshwright.cost.memory import Memory, cached_bytes, estimate, outside_bytes, stages_of
from meshwright.cost.quantities import Job, StageQuantities
from meshwright.cost.terms import (
    MOMENTS,
    TERMS,
    Part,
    activation_bytes,
    buffer_parts,
    gathered_parts,
    gradients_are_cut,
    moment_terms,
    parted_bytes,
    passing_bytes,
    second_bytes,
    staged_bytes,
)
from meshwright.spec.estimate import MemoryEstimate, Term
from meshwright.spec.model_spec import Bytes

FITS: Final[tuple[Literal["no", "tight", "yes"], ...]] = ("no", "tight", "yes")
MOMENT_WORDS: Final = {
    "forward": "forward pass of the last block",
    "logits": "logits and loss, before backward",
    "loss": "logits and loss, as backward begins",
    "backward": "backward pass of the last block",
    "backward_end": "end of the backward pass",
    "reduction": "reduction of what is in no block",
    "update": "optimizer step",
}


def explain(job: Job, candidate: Candidate, memory: Memory | None = None) -> MemoryEstimate:
    """The terms of one candidate's fullest moment, of its fullest stage, for one rank.

    Args:
        job: what is trained, and by which program.
        candidate: how it is cut.
        memory: its estimate, if it is known already.
    """
    found = estimate(job, candidate) if memory is None else memory
    stage, moment = stages_of(job, candidate)[int(found.stage[0])], MOMENTS[int(found.moment[0])]
    q = StageQuantities(job, candidate, stage)
    amounts = {name: float(amount) for name, amount in moment_terms(q)[moment].items()}
    asked, idle = sum(amounts.values()), float(cached_bytes(q)[moment])
    terms = [Term(name, amounts[name], "bytes", _formula(name, q, moment), _source(name, q)) for name in TERMS]
    low, work = job.engine.allocator_low, job.engine.workspace_bytes
    held = f"{_n(low)} x ({_n(asked)} + {_n(work)} + {_n(idle)}) - {_n(asked)}"
    outside = float(outside_bytes(job, candidate))
    terms += [
        Term("allocator", low * (asked + work + idle) - asked, "bytes", held, _ALLOCATOR),
        Term("context", outside, "bytes", _n(outside), "device context and libraries, and buffers of communicators"),
    ]
    where = f", {stage} stage of {candidate.pp}" if candidate.pp > 1 else ""
    return MemoryEstimate(
        tuple(terms),
        moment=MOMENT_WORDS[moment] + where,
        reserved_bytes=math.ceil(float(found.reserved_bytes[0])),
        capacity_bytes=job.capacity_bytes,
        fits=FITS[int(found.fits[0])],
    )


_ALLOCATOR: Final = "reserved / allocated of PyTorch's caching allocator (make validate)"


def _n(value: float) -> str:
    """A number as formulas have it."""
    value = float(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:,.6g}" if abs(value) < 1e4 else f"{value:,.2f}"


def _share(q: StageQuantities, whole: bool) -> str:
    """Trained parameters of this rank: all of them, or its part."""
    dense, experts, group = float(q.root + q.blocks - q.frozen), float(q.experts), float(q.shard_group)
    if whole or group == 1:
        return _n(dense + experts)
    text = f"{_n(dense)} / {_n(group)}"
    among = max(group / float(q.columns.ep), 1.0)
    return text if not experts else f"({text} + {_n(experts)} / {_n(among)})"


def _formula(name: str, q: StageQuantities, moment: str) -> str:
    match name:
        case "parameters":
            return _parameters(q)
        case "gradients":
            second = float(second_bytes(q))
            text = f"{_n(q.job.states.gradient_bytes)} x {_share(q, not gradients_are_cut(q))}"
            return f"{text} + {_n(second)}" if second else text
        case "optimizer_state":
            off = " x 0" if q.columns.offload else ""
            return f"{_n(q.job.states.optimizer_bytes)} x {_share(q, q.columns.zero_stage < 1)}{off}"
        case "activations":
            return _activations(q, moment)
        case "gathered_parameters":
            return _parts(gathered_parts(q)[moment])
        case "gradient_buffers":
            return _parts(buffer_parts(q, transient=False)[moment])
        case _:
            return _loss(q, moment)


def _parameters(q: StageQuantities) -> str:
    states = q.job.states
    is_cut = q.columns.zero_stage >= (1 if states.cuts == "fsdp2" else 3)
    text = f"{_n(states.parameter_bytes)} x {_share(q, not is_cut)}"
    frozen = float(q.frozen)
    group = f" / {_n(float(q.shard_group))}" if is_cut else ""
    twin = float(q.twin)
    text += f" + {_n(states.parameter_bytes)} x {_n(twin)}{group}" if twin else ""
    return f"{text} + {_n(states.frozen_bytes)} x {_n(frozen)}{group}" if frozen else text


def _activations(q: StageQuantities, moment: str) -> str:
    flight, kept, ends = float(q.in_flight), float(q.kept_by_layer), float(q.ends_kept)
    layers, working = float(q.content.layers), float(q.working)
    sample = f"{_n(flight)} x {_n(layers)} layers x {_n(kept)} + {_n(ends)}"
    parted = {name: float(amount) for name, amount in parted_bytes(q).items()}
    for more in (float(passing_bytes(q)), parted["waiting"]):
        sample += f" + {_n(more)}" if more else ""
    match moment:
        case "forward":
            return f"{sample} - {_n(float(q.after_kept))} + {_n(float(q.forward_peak))}"
        case "logits" | "loss":
            return sample
        case "backward":
            return f"{sample} - {_n(float(q.after_kept))} + {_n(max(working, parted['inputs']))}"
        case "backward_end" if q.parts_backward:
            return f"{sample} - {_n(float(q.after_kept))} + {_n(parted['weights'])}"
        case "backward_end":
            others = float(staged_bytes(q))
            return f"{_n(kept)} + {_n(working)}{f' + {_n(others)}' if others else ''}"
        case _:
            return _n(float(activation_bytes(q)[moment]))


def _parts(parts: list[Part]) -> str:
    """`2 x 1,050,677,248 + 2 x 436,224,000`: bytes of an element x elements."""
    told = [(float(each), float(count)) for each, count in parts]
    return " + ".join(f"{_n(each)} x {_n(count)}" for each, count in told if each and count) or "0"


def _loss(q: StageQuantities, moment: str) -> str:
    parted = float(parted_loss(q).get(moment, 0.0))
    text = "0" if moment in ("backward_end", "reduction", "update") else _plain_loss(q, moment)
    return f"{text} + {_n(parted)}" if parted else text


def _plain_loss(q: StageQuantities, moment: str) -> str:
    waiting, kept = float(q.head_in_flight) - 1, float(loss_kept(q))
    text = f"{_n(waiting)} x {_n(kept)}" if waiting and kept else ""
    if q.job.engine.keeps_logits and float(q.has_last) and q.columns.pp > 1:
        logits = q.bytes_of(Bytes(inner=float(q.job.engine.compute_bytes * q.job.model.vocab_size)))
        text += f"{' + ' if text else ''}{q.columns.num_microbatches} x {_n(float(logits))}"
    peak = float(loss_now(q).get(moment, 0.0))
    if not peak:
        return text or "0"
    logits = float(q.tokens) * q.job.model.vocab_size / q.columns.tp
    now = _n(peak)  # of a model without a vocabulary
    if logits:
        now = f"{_n(peak / logits)} x {_n(float(q.tokens))} tokens x {_n(q.job.model.vocab_size)} / {q.columns.tp}"
    return f"{text} + {now}" if text else now


def _source(name: str, q: StageQuantities) -> str:
    states, c = q.job.states, q.columns
    if name in ("parameters", "gradients", "optimizer_state"):
        return f"{states.name}: {states.source}"
    if name == "activations":
        how = f"recompute {RECOMPUTE[c.recompute]}"
        return f"{q.job.model.source}; {how}" + (f"; {SCHEDULES[c.schedule]}" if c.pp > 1 else "")
    if name == "logits_and_loss":
        return f"{q.job.model.source}; cross-entropy"
    return f"{q.job.engine.name}: parameters gathered and gradients reduced unit by unit"
