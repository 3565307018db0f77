"""The folder of a run: may this run start in it, and from which step? No torch.

recipe.toml      resolved
metrics.jsonl    one object a step
samples.jsonl    sample ids of each step, if asked for
plan.json        how the layout was chosen, if it was
memory.json      what one step took of the device, beside what was predicted
summary.json     how it ended
checkpoints/     step-00000020, ...
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from meshwright.errors import CheckpointError, SpecError
from meshwright.spec.dump import to_toml
from meshwright.spec.load import from_table
from meshwright.spec.recipe import Recipe
from meshwright.train import stored
from meshwright.train.stored import CHECKPOINTS, Stored

RECIPE: Final = "recipe.toml"
METRICS: Final = "metrics.jsonl"
SAMPLES: Final = "samples.jsonl"
SUMMARY: Final = "summary.json"
PLAN: Final = "plan.json"
MEMORY: Final = "memory.json"


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
    _require_folder(folder)
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
    _require_same_workload(checkpoint, recipe)
    return Start(checkpoint, [*passed, line])


def _require_folder(folder: Path) -> None:
    """Refuse a name that is none, or that something else has."""
    asked, hint = f"run folder {folder}", "Name another with --run-dir."
    try:
        str(folder).encode()  # safetensors opens no other paths
        os.lstat(folder)
        taken = not folder.is_dir()
    except (FileNotFoundError, NotADirectoryError):
        above = next(path for path in folder.absolute().parents if os.path.lexists(path))
        if not above.is_dir():
            raise SpecError(asked, f"cannot be made: {above} is a file.", hint) from None
        return
    except OSError as error:
        raise SpecError(asked, f"cannot be used: {error.strerror}.", hint) from None
    except ValueError as error:
        raise SpecError(f"run folder {str(folder)!r}", f"is no path in UTF-8: {error}.", hint) from None
    if taken:
        raise SpecError(asked, "is a file.", hint)


def _require_unused(folder: Path) -> None:
    held = [name for name in (METRICS, SUMMARY, RECIPE) if (folder / name).exists()]
    if stored.candidates(folder) or held:
        what = f"{len(stored.candidates(folder))} checkpoints" if stored.candidates(folder) else held[0]
        raise SpecError(
            f"run folder {folder}",
            f"holds a run already ({what}).",
            "Continue it with --resume, or name another with --run-dir.",
        )


def _require_same_workload(checkpoint: Stored, recipe: Recipe) -> None:
    """Refuse what decides what is trained; knobs may change."""
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


def microbatch_lines(start: Start, recipe: Recipe) -> list[str]:
    """What to say where a settled recipe cuts its steps into other microbatches than the checkpoint's run did."""
    if start.checkpoint is None:
        return []
    before, now = start.checkpoint.manifest["recipe"]["batch"]["microbatch_size"], recipe.batch.microbatch_size
    if before == now:
        return []
    return [
        f"resume: batch.microbatch_size was {before}, now {now}: dropout and rounding differ from here on, "
        "so exactness ends at this step"
    ]


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, default=str)


def open_folder(folder: Path, recipe: Recipe, start: Start, plan: Mapping[str, Any] | None = None) -> None:
    """Make the folder ready for a run that begins at `start`: cut metrics past it off, write recipe and plan.

    Raises:
        CheckpointError: it cannot be written to.
    """
    with writing(folder):
        (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        (folder / SUMMARY).unlink(missing_ok=True)
        for name in (METRICS, SAMPLES):
            _cut(folder / name, start.step)
    write_recipe(folder, recipe)
    if plan is not None:
        with writing(folder):
            write_text(folder / PLAN, json.dumps(plan, indent=1) + "\n")


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the resolved recipe.

    Raises:
        CheckpointError: it cannot be written.
    """
    with writing(folder):
        write_text(folder / RECIPE, to_toml(recipe))


def _cut(path: Path, step: int) -> None:
    """Keep the lines of steps up to `step`; a half-written last line goes too."""
    if path.exists():
        write_text(path, "".join(json.dumps(row) + "\n" for row in _rows(path) if row["step"] <= step))


def _rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a record; a power cut may have left anything behind them."""
    rows = []
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
            rows += [row] if isinstance(row["step"], int) else []
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
    return rows


def last_row(folder: Path, step: int) -> dict[str, Any]:
    """The line of a step in metrics.jsonl; empty if there is none."""
    path = folder / METRICS
    found = [row for row in _rows(path) if row["step"] == step] if path.is_file() else []
    return found[-1] if found else {}


def read_summary(folder: Path, step: int) -> dict[str, Any] | None:
    """summary.json, if it tells of a run that ended at this step."""
    try:
        summary = json.loads((folder / SUMMARY).read_bytes())
        return summary if summary["step"] == step else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make what goes wrong with a run folder's files (disk full, no rights) a CheckpointError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        what = Path(error.filename) if isinstance(error.filename, str) else folder
        raise CheckpointError(f"run folder {folder}", f"{what.name} cannot be written: {error.strerror}.") from error


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    beside = path.with_name(f".{path.name}.writing")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
