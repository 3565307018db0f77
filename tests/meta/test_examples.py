"""Each example runs, and says what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
HERE = Path(sys.executable).parent


def run(*words: str) -> str:
    """Run a command in the project's folder; its output."""
    environment = os.environ | {"PATH": f"{HERE}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def own_module(*words: str) -> list[float]:
    out = run(sys.executable, "examples/own_module.py", "--steps", "20", *words)
    found = [float(text) for text in re.findall(r"loss (\d+\.\d+)", out)]
    assert len(found) == 3, out
    return found


@pytest.mark.parametrize("words", [["--nproc", "2"], ["--nproc", "2", "--by-hand"]])
def test_own_module_matches_one_process(words: list[str]) -> None:
    single = own_module("--nproc", "1")
    assert single[1] < single[0]
    # printed to 6 decimals; fp32 sums over 2 ranks round differently by about 1e-7 a step
    assert own_module(*words) == pytest.approx(single, rel=1e-4, abs=2e-6)


def test_own_module_in_fp64_matches_to_every_printed_digit() -> None:
    assert own_module("--nproc", "2", "--precision", "fp64") == own_module("--nproc", "1", "--precision", "fp64")


def test_own_module_runs_under_torchrun() -> None:
    out = run("torchrun", "--standalone", "--nproc-per-node", "2", "examples/own_module.py", "--steps", "10")
    assert out.count("step 10 ") == 1, "rank 0 alone speaks"


def test_a_tiny_recipe_trains_and_its_model_writes(tmp_path: Path) -> None:
    out = run("meshwright", "train", "recipes/tiny.toml", "--nproc", "2", "--run-dir", str(tmp_path / "run"))
    assert "done: step 20 of 20" in out
    text = run(sys.executable, "examples/generate_text.py", str(tmp_path / "run"), "--prompt", "def ", "--tokens", "20")
    assert text.startswith("def ") and len(text) > 20


def test_every_example_is_run_here_or_by_the_demo() -> None:
    text = Path(__file__).read_text() + (ROOT / "Makefile").read_text()
    assert all(path.name in text for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh"))


def test_every_recipe_loads() -> None:
    from meshwright.spec.load import load

    names = [load(path).model.name for path in sorted((ROOT / "recipes").glob("*.toml"))]
    assert len(names) >= 2 and None not in names
