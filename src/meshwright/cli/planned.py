"""`[layout]` left out: what `train` has planned before it starts. Light: what does the work is in plan_run.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.spec.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Planned:
    """A recipe whose layout has been planned.

    Attributes:
        recipe: with its layout, and with whatever else had to change for it to fit; as it was if it was not planned.
        lines: what was chosen and why.
        document: the whole plan, for plan.json; None if it was not planned.
    """

    recipe: Recipe
    lines: tuple[str, ...]
    document: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be planned before a run.

    Attributes:
        path: of the recipe's file.
        overrides: that were given with it.
        nproc: processes.
    """

    path: str
    overrides: tuple[str, ...]
    nproc: int

    def plan(self, recipe: Recipe) -> Planned:
        """Choose the layout; see `plan_run`, which needs numpy: a wrong recipe is refused without it."""
        from meshwright.cli.plan_run import plan_run

        return plan_run(recipe, self.path, self.overrides, self.nproc)


def leaves_open(recipe: Recipe, nproc: int) -> bool:
    """Does `[layout]` leave the degrees to the plan?

    On one process there is one layout, and a module of the user's own, which would have to be traced, is not planned.
    """
    section = recipe.layout
    is_named = section.dp_replicate is not None or section.zero_stage is not None
    is_open = not is_named and section.dp_shard * section.tp * section.pp == 1
    return is_open and (nproc > 1 or recipe.model.build is None)
