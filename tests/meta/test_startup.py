"""The command line answers at once: nothing heavy is imported for a help text or a look at a run folder."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from train.runs import save_tiny

PYTHON, COMMAND = sys.executable, str(Path(sys.executable).with_name("meshwright"))
HEAVY = ("torch", "numpy", "tomllib", "tqdm", "safetensors", "tomli_w", "tensorboard", "multiprocessing")
LIMIT_S = 0.150
"""CPU seconds, not wall time, above `python -c pass`."""

ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONSTARTUP")}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        save_tiny(folder / "checkpoints", step)
    return folder


def words_of(name: str, run_dir: Path) -> list[str]:
    return [str(run_dir) if word == "DIR" else word for word in name.split()]


COMMANDS = [
    "--help", "--version", "train --help", "checkpoint --help",
    "checkpoint ls DIR", "checkpoint show DIR", "checkpoint verify DIR", "checkpoint digest DIR",
]  # fmt: skip


def imported(code: str) -> list[str]:
    """Which heavy modules a fresh interpreter has after running the code."""
    tail = f"\nimport sys\nsys.stderr.write('\\n' + repr([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([PYTHON, "-c", code + tail], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return list(eval(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("name", COMMANDS)
def test_no_heavy_module_is_imported(name, run_dir) -> None:
    words = words_of(name, run_dir)
    lines = ("from meshwright.cli.main import main", "try:", f"    main({words!r})", "except SystemExit as end:")
    assert imported("\n".join([*lines, "    assert not end.code"])) == []


def test_a_wrong_recipe_is_refused_without_torch(tmp_path) -> None:
    (tmp_path / "r.toml").write_text("[train]\nstesp = 3\n")
    code = f"from meshwright.cli.main import main\nassert main(['train', {str(tmp_path / 'r.toml')!r}]) == 2"
    assert set(imported(code)) <= {"tomllib", "multiprocessing"}


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert imported("import meshwright; meshwright.__version__; dir(meshwright)") == []
    assert imported("import meshwright.errors, meshwright.cli.main") == []


def cpu_s(words: list[str], times: int = 7) -> float:
    """CPU seconds of a command, user and system; the best of several, as others use the machine too."""
    best = float("inf")
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=60, env=ENVIRONMENT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return best


@pytest.fixture(scope="module")
def bare_s() -> float:
    return cpu_s([PYTHON, "-c", "pass"])


@pytest.mark.alone
@pytest.mark.parametrize("name", ["--help", "train --help", "checkpoint ls DIR"])
def test_the_command_starts_within_its_budget(name, run_dir, bare_s) -> None:
    spent = cpu_s([COMMAND, *words_of(name, run_dir)]) - bare_s
    assert spent <= LIMIT_S, f"{spent * 1e3:.0f} ms"


def test_what_the_package_exports_is_complete_and_sorted() -> None:
    assert list(meshwright.__all__) == sorted(meshwright.__all__)
    assert {name: getattr(meshwright, name).__name__ for name in meshwright.__all__ if name != "__version__"} == {
        "launch": "launch",
        "setup": "setup",
    }
    public = {name for name in dir(meshwright) if not name.startswith("_")}
    modules = {
        name for name, module in vars(meshwright).items() if getattr(module, "__name__", "").startswith("meshwright.")
    }
    assert public - modules <= set(meshwright.__all__) | {"annotations", "TYPE_CHECKING", "Any"}
    assert set(meshwright.__all__) <= set(dir(meshwright))
    with pytest.raises(AttributeError, match="no attribute 'lauch'"):
        meshwright.lauch  # noqa: B018 -- the look-up is the test
