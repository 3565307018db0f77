"""What a run of this recipe should measure, moment by moment: the predicted half of memory.json."""

from __future__ import annotations

from meshwright.cost.candidate import RECOMPUTE, SCHEDULES, Candidate
from meshwright.cost.closed_form import COMPUTE_BYTES
from meshwright.cost.engine import own_engine, process_engine
from meshwright.cost.quantities import Job
from meshwright.cost.run_moments import run_moments
from meshwright.cost.states import states_of
from meshwright.spec.batch import plan_batch
from meshwright.spec.layout import Layout
from meshwright.spec.model_spec import ModelSpec
from meshwright.spec.recipe import Recipe


def forecast(recipe: Recipe, layout: Layout, device: str, model: ModelSpec) -> dict[str, dict[str, int]]:
    """Bytes of the fullest rank, by moment (`spec.moments`) and term.

    Args:
        recipe: of the run.
        layout: of the run, resolved.
        device: cpu | cuda.
        model: a trace of its model, for that device's kernels.
    """
    make = process_engine if device == "cpu" else own_engine
    job = Job(
        model=model,
        global_batch_size=recipe.batch.global_batch_size,
        states=states_of(recipe),
        engine=make(COMPUTE_BYTES[recipe.precision.compute], exact=recipe.train.reduction == "exact"),
        capacity_bytes=1,  # no verdict is asked for
    )
    return run_moments(job, candidate_of(recipe, layout))


def candidate_of(recipe: Recipe, layout: Layout) -> Candidate:
    """A recipe's own layout and knobs.

    Raises:
        BatchError: the layout does not divide its batch.
    """
    batch = plan_batch(recipe.batch, layout.dp_degree)
    sync = recipe.train.sync or ("every" if layout.zero_stage >= 2 else "last")
    return Candidate(
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        zero_stage=layout.zero_stage,
        tp=layout.tp,
        pp=layout.pp,
        schedule=SCHEDULES.index(recipe.layout.pp_schedule),
        microbatch_size=batch.microbatch_size,
        num_microbatches=batch.num_microbatches,
        recompute=RECOMPUTE.index(recipe.train.recompute),
        sync_every=int(sync == "every"),
    )
