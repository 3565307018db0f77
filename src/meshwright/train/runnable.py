"""What a recipe may say, and this version does not run. Found before a process starts; no torch."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import Fault, SpecError
from meshwright.parallel.grid import MOST_MICROBATCHES
from meshwright.spec.batch import plan_batch
from meshwright.spec.layout import Layout
from meshwright.spec.recipe import Recipe


def require_runnable(recipe: Recipe, layout: Layout) -> None:
    """Refuse what is legal by itself, but not run by this version.

    Args:
        recipe: what is to run.
        layout: its layout, resolved.

    Raises:
        SpecError: with every such key, and the nearest that runs.
    """
    faults = list(_faults(recipe, layout))
    if faults:
        raise SpecError("not run by this version", "; ".join(map(str, faults)), faults=faults)


def _faults(recipe: Recipe, layout: Layout) -> Iterator[Fault]:
    if layout.tp * layout.pp > 1:
        nearest = Layout(dp_shard=layout.world_size, zero_stage=3).word
        yield Fault(f"layout {layout.word}", "this version cuts by data parallelism and ZeRO.", f"Nearest: {nearest}.")
    total = plan_batch(recipe.batch, layout.dp_degree).total_microbatches
    if recipe.train.reduction == "exact" and total > MOST_MICROBATCHES:
        size = -(-recipe.batch.global_batch_size // MOST_MICROBATCHES)
        rule = f"makes {total} microbatches a step; sums of more than {MOST_MICROBATCHES} would not be exact."
        yield Fault("train.reduction = exact", rule, f"Nearest: batch.microbatch_size {size} or more.")
    if recipe.checkpoint.asynchronous:
        yield Fault("checkpoint.asynchronous", "this version saves between steps.", "Nearest: false.")
