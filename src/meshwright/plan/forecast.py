"""What a run of this recipe should measure, moment by moment: the predicted half of memory.json."""

from __future__ import annotations

from meshwright.cost.candidate import RECOMPUTE, SCHEDULES, Candidate
from meshwright.cost.closed_form import COMPUTE_BYTES, KERNELS, model_spec
from meshwright.cost.engine import own_engine, process_engine
from meshwright.cost.quantities import Job
from meshwright.cost.run_moments import run_moments
from meshwright.cost.states import states_of
from meshwright.spec.batch import plan_batch
from meshwright.spec.catalogue import decoder_of_shape
from meshwright.spec.layout import Layout, chunks_of
from meshwright.spec.model_spec import ModelSpec
from meshwright.spec.recipe import Recipe
from meshwright.spec.shape import resolve_shape


def forecast(
    recipe: Recipe, layout: Layout, device: str, model: ModelSpec, rank: int | None = None
) -> dict[str, dict[str, int]]:
    """Bytes by moment (`spec.moments`) and term.

    Args:
        recipe: of the run.
        layout: of the run, resolved.
        device: cpu | cuda.
        model: a trace of its model, for that device's kernels.
        rank: of the pipeline, 0 .. pp - 1; None for the fullest at each moment.
    """
    return run_moments(job_of_run(recipe, layout, device, model), candidate_of(recipe, layout), rank)


def job_of_run(recipe: Recipe, layout: Layout, device: str, model: ModelSpec) -> Job:
    """What a run prices, and counts by (`cost.counts`); see `forecast`."""
    make = process_engine if device == "cpu" else own_engine
    return Job(
        model=_cut_model(recipe, device, model) if layout.tp > 1 else model,
        global_batch_size=recipe.batch.global_batch_size,
        states=states_of(recipe),
        engine=make(COMPUTE_BYTES[recipe.precision.compute], exact=recipe.train.reduction == "exact"),
        capacity_bytes=1,  # no verdict is asked for
    )


def _cut_model(recipe: Recipe, device: str, model: ModelSpec) -> ModelSpec:
    """A reference model in closed form, which knows what tp cuts of it; a trace does not."""
    if recipe.model.name is None:
        return model
    decoder = decoder_of_shape(resolve_shape(recipe.model, recipe.data.seq_len, model.vocab_size))
    kernels = KERNELS["cpu" if device == "cpu" else "cuda"]
    return model_spec(decoder, seq_len=recipe.data.seq_len, compute=recipe.precision.compute, kernels=kernels)


def candidate_of(recipe: Recipe, layout: Layout) -> Candidate:
    """A recipe's own layout and knobs.

    Raises:
        BatchError: the layout does not divide its batch.
    """
    batch = plan_batch(recipe.batch, layout.dp_degree)
    usual = "every" if layout.zero_stage >= 2 and layout.pp == 1 else "last"  # a pipeline reduces once it is over
    sync = recipe.train.sync or usual
    return Candidate(
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        zero_stage=layout.zero_stage,
        tp=layout.tp,
        pp=layout.pp,
        chunks=chunks_of(recipe.layout) if layout.pp > 1 else 1,
        schedule=SCHEDULES.index(recipe.layout.pp_schedule),
        microbatch_size=batch.microbatch_size,
        num_microbatches=batch.num_microbatches,
        recompute=RECOMPUTE.index(recipe.train.recompute),
        sync_every=int(sync == "every"),
    )
