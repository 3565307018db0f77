"""`meshwright train`: find everything wrong that can be found without starting a process, then start the ranks."""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

from meshwright.cli.planned import Planned, PlanRequest, leaves_open
from meshwright.errors import Interrupted, SpecError
from meshwright.spec.batch import plan_batch
from meshwright.spec.layout import resolve
from meshwright.spec.load import load
from meshwright.spec.recipe import Recipe
from meshwright.train.environ import check_nproc, read_place
from meshwright.train.launch import launch
from meshwright.train.run_folder import find_start
from meshwright.train.runnable import require_runnable
from meshwright.train.stored import newest_good


def train(options: argparse.Namespace) -> int:
    """Train what `options.recipe` names; returns the exit code."""
    recipe = load(options.recipe, options.set)
    place = read_place()
    if place is not None:
        check_nproc(options.nproc, place, origin="--nproc")
    folder = Path(options.run_dir) if options.run_dir else None
    if folder is None and options.resume:
        raise SpecError("--resume", "needs the run folder that it continues.", _newest_run(Path(options.recipe).stem))
    if folder is None and place is None:
        folder = default_folder(options.recipe)
    nproc = place.world_size if place else _nproc(recipe, options.nproc)
    request = PlanRequest(options.recipe, tuple(options.set), nproc) if leaves_open(recipe, nproc) else None
    planned = None
    if request and place is None:  # torchrun's ranks join first, and rank 0 plans for all
        planned = request.plan(recipe)
        recipe = planned.recipe
    _require_whole(recipe, nproc)
    if folder is not None and place is None:  # torchrun's ranks join first, and agree
        find_start(folder, recipe, resume=options.resume, hashes=False)
    if place is None:
        _import_for_ranks()
    work = partial(train_rank, recipe, folder, options.recipe, options.resume, planned or request)
    try:
        launch(work, nproc, timeout_s=recipe.train.timeout_s, log_dir=folder if options.debug else None)
    except Interrupted as stop:
        if folder is not None:
            stop.args = (f"{stop} {_how_to_go_on(folder)}",)
        raise
    return 0


def _how_to_go_on(folder: Path) -> str:
    """What a run that was interrupted can be continued from."""
    newest, _ = newest_good(folder, hashes=False)
    if newest is None:
        return f"There is no checkpoint in {folder}."
    return f"The newest checkpoint is of step {newest.step}: continue with --resume --run-dir {folder}."


def default_folder(recipe: str) -> Path:
    """`runs/NAME-TIME`."""
    return Path("runs", f"{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}")


def _newest_run(name: str) -> str:
    found = sorted(path for path in Path("runs").glob(f"{name}-*") if path.is_dir())
    return f"Nearest: --run-dir {found[-1]}." if found else "Name it with --run-dir."


def _nproc(recipe: Recipe, asked: int | None) -> int:
    """What was asked for; else the layout's product; else one for each GPU; else 1."""
    section = recipe.layout
    is_open = section.dp_replicate is None and section.dp_shard * section.tp * section.pp == 1
    available = 1
    if asked is None and is_open:
        import torch

        available = max(1, torch.cuda.device_count())
    return resolve(section, asked, available).world_size


def _require_whole(recipe: Recipe, nproc: int) -> None:
    """The layout multiplies to nproc, this version runs it, and the batch identity has a whole solution on it."""
    layout = resolve(recipe.layout, nproc)
    require_runnable(recipe, layout)
    plan_batch(recipe.batch, layout.dp_degree)


def _import_for_ranks() -> None:
    """Import once what every rank needs, where ranks are forked (where there is no GPU; see `launch`)."""
    import torch

    if torch.cuda.device_count() == 0:
        import torch._dynamo  # by the first optimizer at the latest, and it takes as long as torch itself

        import meshwright.train.run  # noqa: F401


def train_rank(
    recipe: Recipe, folder: Path | None, name: str, resume: bool, planned: Planned | PlanRequest | None = None
) -> None:
    """What each rank does.

    Args:
        recipe: to be trained.
        folder: run folder; None for the default.
        name: of the recipe's file.
        resume: continue the folder's newest good checkpoint.
        planned: the plan of an open layout, or what is to be planned; None where the recipe has a layout.
    """
    from meshwright.plan.forecast import forecast
    from meshwright.train.agree import Agreement
    from meshwright.train.foresight import Foresight
    from meshwright.train.run import run_recipe
    from meshwright.train.world import join_world

    with join_world(recipe.train.timeout_s) as world:
        agreement = Agreement(world.rank, world.world_size)
        if folder is None:
            folder = agreement.on_rank_0(lambda: default_folder(name))
        if isinstance(planned, PlanRequest):
            request = planned
            planned = agreement.on_rank_0(lambda: request.plan(recipe))
        known = Foresight(forecast=forecast)
        if planned is not None:
            recipe, known = planned.recipe, Foresight(lines=planned.lines, plan=planned.document, forecast=forecast)
        run_recipe(recipe, folder, resume=resume, world=world, foresight=known)
