"""A recipe and a cluster -> a Request: which model is priced, by which byte recipe, and what is left to the search."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from meshwright.cost.closed_form import COMPUTE_BYTES, KERNELS, model_spec
from meshwright.cost.engine import Engine, own_engine, process_engine
from meshwright.cost.quantities import Job
from meshwright.cost.states import StateRecipe, states_of
from meshwright.errors import LayoutError, SpecError
from meshwright.plan.plan import Request
from meshwright.plan.space import Knobs
from meshwright.spec.batch import lr_factor
from meshwright.spec.cluster import Cluster
from meshwright.spec.decoder import DecoderSpec
from meshwright.spec.layout import resolve
from meshwright.spec.model_spec import ModelSpec
from meshwright.spec.optimizers import OPTIMIZERS, is_elementwise
from meshwright.spec.recipe import Recipe

ModelAt = Callable[[int], ModelSpec]
"""A model for a sequence length."""


def request_of(
    recipe: Recipe,
    cluster: Cluster,
    model: DecoderSpec | ModelSpec,
    *,
    given: Collection[str] = (),
    states: StateRecipe | None = None,
    layouts: Sequence[str] = (),
    lines: Sequence[str] = (),
    runs_first: bool = False,
    fused: bool = False,
    top: int = 20,
) -> Request:
    """What is to be planned for a recipe.

    Args:
        recipe: the run; its layout may be open.
        cluster: what it is to run on.
        model: the recipe's: a decoder, which is priced in closed form, or a trace at the recipe's length and type.
        given: key paths that the user wrote (`train.recompute`); what has a default and is not among them is planned.
        states: the byte recipe; None for what a run of this recipe holds.
        layouts: words of the layouts to look at; none for all.
        lines: sentences to print with the plan.
        runs_first: a run is to start.
        fused: the model has fused norms; a Hugging Face model of a recipe has its own, which keep more.
        top: candidates that the plan keeps.

    Raises:
        SpecError: a sequence longer than the model's learned positions.
    """
    model_at = _closed_form(recipe, model, cluster, fused) if isinstance(model, DecoderSpec) else None
    now = model_at(recipe.data.seq_len) if model_at else model
    assert isinstance(now, ModelSpec)
    job = Job(
        model=now,
        global_batch_size=recipe.batch.global_batch_size,
        states=states or states_of(recipe),
        engine=engine_of(recipe, cluster),
        capacity_bytes=cluster.device.memory_bytes,
    )
    known = OPTIMIZERS.get(recipe.optimizer.name) if recipe.optimizer.build is None else None
    return Request(
        job=job,
        cluster=cluster,
        knobs=_knobs(recipe, given),
        layouts=tuple(layouts),
        asked="" if layouts else _asked(recipe, cluster),
        runs_first=runs_first,
        cuttable=known.cuttable if known else True,
        elementwise=is_elementwise(recipe.optimizer),
        optimizer=recipe.optimizer.build or recipe.optimizer.name,
        model_at=model_at,
        origin=model.source,
        lines=(*_rate_lines(recipe), *_length_lines(recipe, now), *lines),
        top=top,
    )


def engine_of(recipe: Recipe, cluster: Cluster) -> Engine:
    """How a run of this recipe holds memory there."""
    make = process_engine if cluster.device.kind == "cpu" else own_engine
    return make(COMPUTE_BYTES[recipe.precision.compute], exact=recipe.train.reduction == "exact")


def _closed_form(recipe: Recipe, decoder: DecoderSpec, cluster: Cluster, fused: bool) -> ModelAt:
    limit, asked = decoder.learned_positions, recipe.data.seq_len
    if limit and asked > limit:
        rule = f"is {asked}; {decoder.name} has {limit} learned positions."
        raise SpecError("data.seq_len", rule, f"Nearest: {limit}.")
    own = "cpu" if cluster.device.kind == "cpu" else "cuda"
    kernels = KERNELS["hf" if recipe.model.hf and not fused else own]
    return lambda seq_len: model_spec(decoder, seq_len=seq_len, compute=recipe.precision.compute, kernels=kernels)


def _knobs(recipe: Recipe, given: Collection[str]) -> Knobs:
    return Knobs(
        microbatch_size=recipe.batch.microbatch_size,
        recompute=recipe.train.recompute if "train.recompute" in given else None,
        sync=recipe.train.sync,
        schedule=recipe.layout.pp_schedule if "layout.pp_schedule" in given else None,
        chunks=recipe.layout.pp_chunks,
    )


def _asked(recipe: Recipe, cluster: Cluster) -> str:
    """The word of the layout that a recipe gives; empty if it leaves it open."""
    section = recipe.layout
    if section.dp_replicate is None and section.dp_shard * section.tp * section.pp == 1:
        return ""
    try:
        return resolve(section, None if section.dp_replicate else cluster.num_devices).word
    except LayoutError:  # It does not divide this cluster; on its own ranks it is still worth a line.
        return resolve(section, None).word


def _length_lines(recipe: Recipe, model: ModelSpec) -> list[str]:
    limit, asked = model.max_seq_len, recipe.data.seq_len
    return (
        [f"length: seq_len {asked:,} is beyond the {limit:,} that the model was made for"]
        if limit and asked > limit
        else []
    )


def _rate_lines(recipe: Recipe) -> list[str]:
    line = lr_factor(recipe.optimizer, recipe.batch).line
    return [f"learning rate: {line}"] if line else []
