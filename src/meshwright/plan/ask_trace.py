"""Ask a child process for a ModelSpec: tracing a module needs torch, and this wing has none."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from meshwright.errors import SpecError
from meshwright.spec.model_file import spec_from_json
from meshwright.spec.model_spec import ModelSpec

PROGRAM: Final = "meshwright.train.trace_recipe"
TIMEOUT_S: Final = 300.0


def trace_in_child(
    recipe: str | os.PathLike[str],
    sets: Sequence[str] = (),
    *,
    kernels: Literal["cuda", "cpu"],
    timeout_s: float = TIMEOUT_S,
) -> ModelSpec:
    """Describe the model of a recipe by a trace, in a process of its own.

    Args:
        recipe: path of a recipe file, or the text of one; what it names is looked for from the current directory.
        sets: `key=value` each, as given to `--set`.
        kernels: cuda | cpu, whose kernels decide what is kept.
        timeout_s: seconds until the process is ended.

    Raises:
        SpecError: the recipe's model could not be traced; one line says why.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-trace-") as folder:
        path = _as_file(recipe, Path(folder))
        asked = "the model of the recipe" if path.parent == Path(folder) else f"the model of {path}"
        out = Path(folder, "model.json")
        words = [sys.executable, "-m", PROGRAM, str(path), "--out", str(out), "--kernels", kernels]
        words += [f"--set={one}" for one in sets]
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            rule = f"was not traced within {timeout_s:g} s."
            raise SpecError(asked, rule, "A shorter data.seq_len or fewer layers take less.") from None
        if done.returncode or not out.is_file():
            raise SpecError(asked, f"could not be traced: {_why(done)}")
        return spec_from_json(out.read_text(encoding="utf-8"), str(out))


def _as_file(recipe: str | os.PathLike[str], folder: Path) -> Path:
    """The recipe's file; text becomes one."""
    if not isinstance(recipe, str) or ("\n" not in recipe and "=" not in recipe):
        return Path(recipe)
    path = folder / "recipe.toml"
    path.write_text(recipe, encoding="utf-8")
    return path


def _why(done: subprocess.CompletedProcess[str]) -> str:
    """What the process said last: its one line about the recipe, or the end of a traceback; else how it ended."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    how = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return lines[-1] if lines else f"its process said nothing ({how})."
