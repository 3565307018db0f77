"""The folder of a run: may this run start in it, and from which step? No torch.

recipe.toml      resolved
metrics.jsonl    one object a step
samples.jsonl    sample ids of each step, if asked for
summary.json     how it ended
checkpoints/     step-00000020, ...
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from meshwright.errors import CheckpointError, SpecError
from meshwright.spec.dump import to_toml
from meshwright.spec.load import from_table
from meshwright.spec.recipe import Recipe
from meshwright.train import stored
from meshwright.train.stored import Stored

RECIPE: Final = "recipe.toml"
METRICS: Final = "metrics.jsonl"
SAMPLES: Final = "samples.jsonl"
SUMMARY: Final = "summary.json"
CHECKPOINTS: Final = "checkpoints"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins.

    Attributes:
        checkpoint: what it continues; None for step 0.
        lines: what the user is told about it.
    """

    checkpoint: Stored | None = None
    lines: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Optimizer steps that are done already."""
        return self.checkpoint.step if self.checkpoint else 0


def find_start(folder: Path, recipe: Recipe, *, resume: bool, hashes: bool) -> Start:
    """Decide where a run begins; reads only.

    Args:
        folder: run folder; need not exist.
        recipe: what is to run.
        resume: continue the newest good checkpoint.
        hashes: read every byte of the checkpoint.

    Raises:
        SpecError: the folder holds a run and resume is False, or the recipe differs in more than knobs.
        CheckpointError: there are checkpoints, and all are torn.
    """
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"run folder {folder}", "is a file.", "Name another with --run-dir.")
    if not resume:
        _require_unused(folder)
        return Start()
    checkpoint, passed = stored.newest_good(folder, hashes=hashes)
    if checkpoint is None and passed:
        listed = "\n  ".join(passed)
        raise CheckpointError(
            f"run folder {folder}",
            f"has no whole checkpoint:\n  {listed}\n",
            "Nothing was changed. Start anew in another --run-dir.",
        )
    if checkpoint is None:
        return Start(lines=["resume: no checkpoint yet, starting at step 0"])
    line = f"resume: step {checkpoint.step} from {checkpoint.path}"
    return Start(checkpoint, [*passed, line, *_changes(checkpoint, recipe)])


def _require_unused(folder: Path) -> None:
    held = [name for name in (METRICS, SUMMARY, RECIPE) if (folder / name).exists()]
    if stored.candidates(folder) or held:
        what = f"{len(stored.candidates(folder))} checkpoints" if stored.candidates(folder) else held[0]
        raise SpecError(
            f"run folder {folder}",
            f"holds a run already ({what}).",
            "Continue it with --resume, or name another with --run-dir.",
        )


def _changes(checkpoint: Stored, recipe: Recipe) -> list[str]:
    """Lines about knobs that changed.

    Raises:
        SpecError: something changed that decides what is trained.
    """
    then = from_table(checkpoint.manifest["recipe"], where=f"recipe in {checkpoint.path}")
    changed = then.workload.differences(recipe.workload)
    if changed:
        listed = "; ".join(f"{path} was {_shown(old)}, now {_shown(new)}" for path, old, new in changed)
        raise SpecError(
            f"resuming {checkpoint.path}",
            f"would train something else: {listed}.",
            "These stay as they were; [layout], [cluster], [checkpoint], [record], validation.every_steps, "
            "train.stop_after, record_samples, recompute, sync, timeout_s and batch.microbatch_size may change.",
        )
    before, now = then.batch.microbatch_size, recipe.batch.microbatch_size
    if before == now or now is None:
        return []
    return [
        f"resume: batch.microbatch_size was {before}, now {now}: dropout and rounding differ from here on, "
        "so exactness ends at this step"
    ]


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, default=str)


def open_folder(folder: Path, recipe: Recipe, start: Start) -> None:
    """Make the folder ready for a run that begins at `start`: cut metrics past it off, write the resolved recipe.

    Raises:
        CheckpointError: it cannot be written to.
    """
    try:
        (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        (folder / SUMMARY).unlink(missing_ok=True)
        for name in (METRICS, SAMPLES):
            _cut(folder / name, start.step)
        write_text(folder / RECIPE, to_toml(recipe))
    except OSError as error:
        raise CheckpointError(f"run folder {folder}", f"cannot be written to: {error.strerror}.") from error


def _cut(path: Path, step: int) -> None:
    """Keep the lines of steps up to `step`; a half-written last line goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    write_text(path, "".join(kept))


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    beside = path.with_name(f".{path.name}.writing")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
