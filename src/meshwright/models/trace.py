"""Any nn.Module into a ModelSpec: run once or twice on tensors without memory, and look at what lives.

No GPU is needed and the module is not touched. The bytes are exact for the kernels that they are traced for: equal, to
the byte, to those of real tensors (tests/models/test_trace.py). Bytes per token are the difference of two microbatch
sizes; sizes from 2 on, because a dimension of 1 is broadcast, and is contiguous whichever way it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.nn as nn

from meshwright.errors import MeshwrightError, SpecError
from meshwright.models.anatomy import is_bare_layer, repeated_blocks
from meshwright.models.resolve import describe
from meshwright.models.trace_pass import Passed, run_pass
from meshwright.models.trace_spec import Traced, assemble, kinds_of, shapes_of
from meshwright.models.trace_stage import Place, Stage, cast_around
from meshwright.models.trace_unit import FULL, Contexts
from meshwright.spec.model_spec import ModelSpec

MICROBATCHES: Final = (2, 3)

Loss = Callable[[nn.Module, Any], Any]
"""f(model, batch) -> (sum, count), a list of such pairs, or a mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is traced.

    Attributes:
        model: the user's module; not changed.
        loss: f(model, batch) -> (sum, count), a list of such pairs, or a mean.
        batch_of: a microbatch of so many samples.
        compute: fp32 | bf16 | fp16 | fp64.
        seq_len: tokens per sample; 1 where samples are no sequences.
        modes: recompute modes besides none, with what torch.utils.checkpoint needs for each.
        microbatches: two sizes.
    """

    model: nn.Module
    loss: Loss
    batch_of: Callable[[int], Any]
    compute: str
    seq_len: int
    modes: Mapping[str, Contexts]
    microbatches: tuple[int, int] = MICROBATCHES


def trace_module(
    model: nn.Module,
    loss: Loss,
    batch_of: Callable[[int], Any],
    *,
    compute: str,
    kernels: Literal["cuda", "cpu"],
    seq_len: int,
    name: str,
    selective: Contexts | None = None,
    microbatches: tuple[int, int] = MICROBATCHES,
    real: bool = False,
) -> ModelSpec:
    """Describe a module for the cost room.

    Args:
        model: bare, with or without memory; in training mode if it is to be traced so.
        loss: f(model, batch) -> (sum, count), a list of such pairs, or a mean.
        batch_of: a microbatch of so many samples, on the CPU.
        compute: fp32 | bf16 | fp16 | fp64.
        kernels: cuda | cpu, whose kernels decide what is kept.
        seq_len: tokens per sample; 1 where samples are no sequences.
        name: as the user knows the model.
        selective: `context_fn` of selective recompute; None leaves that mode out.
        microbatches: the two sizes of the trace. What is kept is a line over them; a peak is the largest of several
            lines, and exact where it was traced.
        real: use real tensors, and the CPU's kernels.

    Returns:
        Its description. A module that looks at the values of its tensors is traced on real ones, and `source` says so.

    Raises:
        SpecError: the model and its loss do not run on such a batch.
    """
    blocks = repeated_blocks(model)
    recomputes = bool(blocks) and not is_bare_layer(blocks[0][1])  # as parallel/recompute.py has it
    subject = Subject(
        model=model,
        loss=loss,
        batch_of=batch_of,
        compute=compute,
        seq_len=seq_len,
        modes={**({"selective": selective} if selective else {}), **FULL} if recomputes else {},
        microbatches=microbatches,
    )
    place, traced = _traced(subject, "real" if real else kernels)
    how = {"cuda": "on meta tensors, CUDA kernels", "cpu": "on fake tensors, CPU kernels", "real": "on real tensors"}
    source = f"trace of {type(model).__name__} {how[place]}, torch {torch.__version__.split('+')[0]}"
    return assemble(model, traced, name=name, seq_len=seq_len, compute=compute, source=source)


def _traced(subject: Subject, place: Place) -> tuple[Place, Traced]:
    """Both passes; on real tensors if the module needs their values and has them."""
    try:
        return place, _run_both(subject, place)
    except MeshwrightError:
        raise
    except Exception as first:
        problem = first
    if place != "real" and not any(parameter.is_meta for parameter in subject.model.parameters()):
        try:
            return "real", _run_both(subject, "real")
        except MeshwrightError:
            raise
        except Exception as second:
            problem = second
    asked = f"tracing the model {type(subject.model).__name__}"
    rule = f"its loss failed on a batch of {subject.microbatches[0]}: {describe(problem)}."
    raise SpecError(asked, rule) from problem


def _run_both(subject: Subject, place: Place) -> Traced:
    """Measure the first block of each kind; blocks of a kind may turn out to keep different amounts, and then again."""
    stage = Stage(place, subject.compute)
    blocks = [block for _, block in repeated_blocks(subject.model)]
    first = {shapes_of(block): index for index, block in reversed(list(enumerate(blocks)))}
    wanted = set(first.values())
    passes = [_run_one(subject, stage, size, wanted) for size in subject.microbatches]
    measured = [dict(one.measured) for one in passes]
    missing = {kind[0] for kind in kinds_of(blocks, passes[0])} - wanted
    if missing:
        for found, size in zip(measured, subject.microbatches, strict=True):
            found |= _run_one(subject, stage, size, missing).measured
    return Traced(subject.microbatches, (passes[0], passes[1]), (measured[0], measured[1]))


def _run_one(subject: Subject, stage: Stage, size: int, measured: set[int]) -> Passed:
    """One pass on a fresh copy."""
    with torch.enable_grad():
        model, batch = stage.module(subject.model), stage.batch(subject.batch_of(size))
        with stage():
            return run_pass(
                model,
                [block for _, block in repeated_blocks(model)],
                partial(_objective, subject.loss),
                batch,
                [*model.parameters(), *model.buffers()],
                subject.modes,
                measured,
                partial(cast_around, compute=subject.compute),
            )


def _objective(loss: Loss, model: nn.Module, batch: Any) -> torch.Tensor:
    """What backward starts from: the sum of the loss's pairs."""
    result = loss(model, batch)
    if isinstance(result, torch.Tensor):
        return result
    first = result[0]
    if isinstance(first, torch.Tensor):
        return first
    totals = [pair[0] for pair in result]
    start: torch.Tensor = sum(totals[1:], totals[0])
    return start
