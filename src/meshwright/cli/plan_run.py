"""`[layout]` left out: choose the layout of a run on this machine, and say in a few lines why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, Literal

from meshwright.cli.plan import given_keys, model_of_recipe
from meshwright.cli.planned import Planned
from meshwright.errors import NoFeasibleLayout, SpecError
from meshwright.plan.option import Option, gib
from meshwright.plan.plan import Plan, Request, make_plan, require_chosen
from meshwright.plan.save import planned_recipe
from meshwright.plan.workload import request_of
from meshwright.report.plan_json import plan_document
from meshwright.spec.batch import plan_batch
from meshwright.spec.decoder import DecoderSpec
from meshwright.spec.local_cluster import local_cluster
from meshwright.spec.model_file import spec_from_json, spec_to_json
from meshwright.spec.model_spec import ModelSpec
from meshwright.spec.recipe import Recipe

_TRACE_LIMIT_S: Final = 120.0
_TOLD: Final = 3
"""Rungs that did not fit, at most, that the lines name."""


def plan_run(recipe: Recipe, path: str, overrides: Sequence[str], nproc: int) -> Planned:
    """Choose the layout of a run on so many devices of this machine.

    A microbatch that the recipe leaves open stays what it is without a plan, the same on every machine, as long as
    something fits with it: exact training depends on it.

    Args:
        recipe: with an open layout.
        path: of its file.
        overrides: that were given with it.
        nproc: processes.

    Raises:
        NoFeasibleLayout: nothing fits, or nothing that this version runs.
        BatchError: the global batch has no whole solution on so many processes.
    """
    usual = plan_batch(recipe.batch, nproc).microbatch_size
    cluster = local_cluster(nproc)
    try:
        model = _model(recipe, path, overrides, "cpu" if cluster.device.kind == "cpu" else "cuda")
    except SpecError as error:  # what is really wrong, the run will say; a model that only runs on ranks is sound
        return Planned(recipe, (f"not planned, data parallel over all processes: {error}",), None)
    request = request_of(recipe, cluster, model, given=given_keys(path, overrides), runs_first=True, top=5)
    made = make_plan(dataclasses.replace(request, knobs=dataclasses.replace(request.knobs, microbatch_size=usual)))
    if recipe.batch.microbatch_size is None and (made.chosen is None or not made.chosen.runs):
        made = make_plan(request)
    chosen = require_chosen(made)
    if not chosen.runs:
        raise _not_run_yet(made.request, chosen)
    one, kept = chosen.candidate, recipe.batch.microbatch_size
    ready = planned_recipe(recipe, one)
    if kept is None and one.microbatch_size == usual:  # left out, as the user wrote it
        ready = dataclasses.replace(ready, batch=recipe.batch)
    return Planned(ready, tuple(_lines(made, chosen)), plan_document(made))


def _model(
    recipe: Recipe, path: str, overrides: Sequence[str], kernels: Literal["cpu", "cuda"]
) -> DecoderSpec | ModelSpec:
    """The recipe's model; one of the user's own is traced in a copy of this process, which has torch for its ranks."""
    if recipe.model.build is None:
        return model_of_recipe(recipe, path, overrides, kernels=kernels)
    from meshwright.train.forked import Forked
    from meshwright.train.trace_recipe import trace_recipe

    text, why = Forked(lambda: spec_to_json(trace_recipe(recipe, kernels=kernels))).result(_TRACE_LIMIT_S)
    if text is None:
        raise SpecError(f'model.build = "{recipe.model.build}"', f"could not be traced: {why}")
    return spec_from_json(text, "its trace")


def _not_run_yet(request: Request, chosen: Option) -> NoFeasibleLayout:
    return NoFeasibleLayout(
        f"{request.job.model.name} on {request.cluster.name}",
        f"what fits is {chosen.word}{' with its optimizer offloaded' * (chosen.candidate.offload > 0)}, which this "
        "version plans and does not run yet.",
        "Nearest: more devices, or devices with more memory (`meshwright plan` says how many).",
    )


def _lines(made: Plan, chosen: Option) -> list[str]:
    one, capacity = chosen.candidate, gib(chosen.memory.capacity_bytes)
    microbatches = f"{one.num_microbatches} microbatch{'es' * (one.num_microbatches != 1)} of {one.microbatch_size}"
    first = (
        f"planned: {chosen.phrase}, {microbatches}: at most {gib(chosen.reserved_bytes)} of {capacity} a rank "
        f"({chosen.memory.moment})"
    )
    words = {"no": "does not fit", "tight": "is tight"}
    before: list[str] = []
    for rung in made.ladder:
        if rung.option is None or rung.option.word == chosen.word:
            break
        if rung.is_legal and rung.option.runs and rung.fits in words:
            before.append(f"  {rung.name} {words[rung.fits]}: {rung.because}")
    return [first, *before[:_TOLD]]
