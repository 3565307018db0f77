"""Each example runs, and says what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.warm import Call, script

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


def run_warm(meshwright: Call, name: str, *words: str) -> str:
    """The same for an example, without the start of its interpreter."""
    done = meshwright(cwd=ROOT, before=script(EXAMPLES / name, *words), limit_s=120.0)
    assert done.code == 0, done.out + done.err
    assert "Traceback" not in done.err
    return done.out


def losses(out: str) -> list[float]:
    found = [float(text) for text in re.findall(r"loss (\d+\.\d+)", out)]
    assert len(found) == 3, out
    return found


OWN = ("own_module.py", "--steps", "20")


@pytest.fixture(scope="module")
def single(meshwright: Call) -> list[float]:
    """Losses of examples/own_module.py on one process."""
    found = losses(run_warm(meshwright, *OWN, "--nproc", "1"))
    assert found[1] < found[0]
    return found


def test_own_module_matches_one_process(single: list[float]) -> None:
    words = (sys.executable, "examples/own_module.py", "--steps", "20", "--nproc", "2")  # as a user starts it
    # printed to 6 decimals; fp32 sums over 2 ranks round differently by about 1e-7 a step
    assert losses(run(*words)) == pytest.approx(single, rel=1e-4, abs=2e-6)


def test_own_module_by_hand_matches_one_process(meshwright: Call, single: list[float]) -> None:
    found = losses(run_warm(meshwright, *OWN, "--nproc", "2", "--by-hand"))
    assert found == pytest.approx(single, rel=1e-4, abs=2e-6)  # as above


def test_own_module_in_fp64_matches_to_every_printed_digit(meshwright: Call) -> None:
    on_1, on_2 = (losses(run_warm(meshwright, *OWN, "--nproc", n, "--precision", "fp64")) for n in "12")
    assert on_1 == on_2


def test_own_module_runs_under_torchrun() -> None:
    out = run("torchrun", "--standalone", "--nproc-per-node", "2", "examples/own_module.py", "--steps", "10")
    assert out.count("step 10 ") == 1, "rank 0 alone speaks"


def test_a_tiny_recipe_trains_and_its_model_writes(meshwright: Call, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    done = meshwright("train", "recipes/tiny.toml", "--nproc", "2", "--run-dir", folder, cwd=ROOT)
    assert done.code == 0 and "done: step 20 of 20" in done.out, done.err
    text = run_warm(meshwright, "generate_text.py", folder, "--prompt", "def ", "--tokens", "20")
    assert text.startswith("def ") and len(text) > 20


def test_every_example_is_run_here_or_by_the_demo() -> None:
    text = Path(__file__).read_text() + (ROOT / "Makefile").read_text()
    assert all(path.name in text for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh"))


def test_every_recipe_loads() -> None:
    from meshwright.spec.load import load

    names = [load(path).model.name for path in sorted((ROOT / "recipes").glob("*.toml"))]
    assert len(names) >= 2 and None not in names
