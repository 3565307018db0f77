"""What a recipe may say, and this version does not run. Found before a process starts; no torch."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import Fault, SpecError
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
    if layout.world_size != layout.dp_replicate:
        nearest = Layout(dp_replicate=layout.world_size).word
        yield Fault(f"layout {layout.word}", "this version trains single and ddpN.", f"Nearest: {nearest}.")
    if recipe.train.reduction == "exact":
        yield Fault("train.reduction", 'this version sums as "fast" does.', 'Nearest: "fast".')
    if recipe.checkpoint.asynchronous:
        yield Fault("checkpoint.asynchronous", "this version saves between steps.", "Nearest: false.")
    if recipe.model.hf is not None:
        yield Fault(
            "model.hf",
            "this version trains `name` and `build` models.",
            "Load it in a function and name that in model.build.",
        )
