"""How the program ends: exit codes, tracebacks only with --debug, our own faults, and pipes whose reader has left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.wrong import IMPATIENT, lay_out
from meshwright import __version__
from meshwright.cli.main import main
from train.runs import rows, save_tiny, summary_of, tree_hash

HERE = Path(sys.executable).parent / "meshwright"
BREAK = "import meshwright.cli.train as t\ndef broken(*a, **k): return 1 / 0\nt.find_start = broken"


def test_help_and_version_end_well(capsys) -> None:
    for words in (["--help"], ["train", "--help"], ["checkpoint", "--help"], ["checkpoint", "export", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 0
        assert capsys.readouterr().out.startswith("usage: meshwright")
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"meshwright {__version__}\n")


def test_the_help_names_the_exit_codes_that_the_errors_have(capsys) -> None:
    from meshwright import errors

    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    known = {cls.exit_code for cls in vars(errors).values() if isinstance(cls, type) and hasattr(cls, "exit_code")}
    for code in known - {3}:  # nothing plans yet, so nothing does not fit
        assert re.search(rf"\b{code} ", text), code


def test_python_m_meshwright_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "meshwright", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"meshwright {__version__}\n", "")


def test_a_fault_of_our_own_is_said_to_be_ours(meshwright, tmp_path) -> None:
    lay_out(tmp_path, {})
    before = tree_hash(tmp_path)
    result = meshwright("train", "r.toml", "--run-dir", "run", cwd=tmp_path, before=BREAK)
    assert result.code == 70
    assert result.err == (
        "meshwright failed by a fault of its own: ZeroDivisionError: division by zero\n"
        "Please report it with what --debug prints.\n"
    )
    assert tree_hash(tmp_path) == before


def test_debug_shows_the_traceback_of_our_own_fault(meshwright, tmp_path) -> None:
    lay_out(tmp_path, {})
    result = meshwright("train", "r.toml", "--run-dir", "run", "--debug", cwd=tmp_path, before=BREAK)
    assert result.code == 70
    assert "Traceback (most recent call last)" in result.err and "in broken" in result.err
    assert result.err.endswith("meshwright failed by a fault of its own: ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("words", "code", "frames"),
    [
        (("--set", "train.steps=x"), 2, ("in load",)),
        (("--set", "model.build=mine:raises"), 2, ("in raises", "ValueError: no such size")),
        (("--set", "loss.build=mine:fails", "--nproc", "2"), 4, ("in fails", "IndexError", "On rank ")),
    ],
)
def test_debug_shows_where_a_mistake_was_found_and_keeps_the_code(meshwright, tmp_path, words, code, frames) -> None:
    lay_out(tmp_path, {})
    plain = meshwright("train", "r.toml", "--run-dir", "run", *words, cwd=tmp_path)
    debug = meshwright("train", "r.toml", "--run-dir", "again", "--debug", *words, cwd=tmp_path)
    assert plain.code == debug.code == code
    assert "Traceback" not in plain.err
    assert "Traceback (most recent call last)" in debug.err
    for frame in frames:
        assert frame in debug.err
    # Which of two ranks fails first is chance.
    last = [re.sub(r"(rank|microbatch) \d", r"\1 N", text.splitlines()[-1]) for text in (plain.err, debug.err)]
    assert last[0] == last[1]


def test_debug_keeps_the_traceback_of_the_rank_in_the_run_folder(meshwright, tmp_path) -> None:
    lay_out(tmp_path, {})
    meshwright("train", "r.toml", "--run-dir", "run", "--debug", "--set", "loss.build=mine:fails", cwd=tmp_path)
    assert "IndexError" in (tmp_path / "run/error-rank0.txt").read_text()


def run_shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A shell line; the exit code is the first command's that failed."""
    env = {**os.environ, "PATH": f"{HERE.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONUNBUFFERED", None)  # it would hide what is left to the last flush
    words = ["bash", "-c", f"set -o pipefail; {line}"]
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=90)


@pytest.mark.parametrize("words", ["checkpoint ls .", "checkpoint show .", "checkpoint digest .", "--help"])
def test_a_reader_that_leaves_early_is_no_error(tmp_path, words) -> None:
    for step in range(40):
        save_tiny(tmp_path / "checkpoints", step, keep_last=99)
    for reader in ("head -1", "true", "sleep 0.5"):
        done = run_shell(f"meshwright {words} | {reader}", tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), reader


def test_training_goes_on_when_the_reader_of_its_lines_has_left(tmp_path) -> None:
    lay_out(tmp_path, {})
    done = run_shell("meshwright train r.toml --run-dir run --nproc 2 | head -1", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("planned: ddp2")
    assert summary_of(tmp_path / "run")["status"] == "done" and len(rows(tmp_path / "run")) == 3


def test_rank_0_alone_speaks_and_says_a_warning_once(meshwright, tmp_path) -> None:
    mean = "def mean(model, batch): return ((model(batch) - batch) ** 2).mean()\n"
    lay_out(tmp_path, {"other.py": "from mine import *\n" + mean})
    result = meshwright(
        "train", "r.toml", "--run-dir", "run", "--nproc", "3", "--set", "loss.build=other:mean", cwd=tmp_path
    )
    assert result.code == 0
    assert len(result.out.splitlines()) == len(set(result.out.splitlines())) == 7
    assert result.err.count("It is taken for a mean over the rows") == 1
    assert "Traceback" not in result.err and "site-packages" not in result.err


def test_the_default_run_folder_has_the_recipe_s_name_and_the_time(meshwright, tmp_path) -> None:
    lay_out(tmp_path, {})
    assert meshwright("train", "r.toml", cwd=tmp_path).code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"r-\d{8}-\d{6}", folder.name) and (folder / "summary.json").exists()
    hint = meshwright("train", "r.toml", "--resume", cwd=tmp_path)
    assert hint.code == 2 and f"Nearest: --run-dir runs/{folder.name}." in hint.err


def test_under_torchrun_a_mistake_is_said_once_a_node(meshwright, tmp_path) -> None:
    """Every rank reads the recipe and finds the same fault before there is anything to agree with.

    The second waits for the first to say it, and says it itself only if nobody ends it meanwhile.
    """
    lay_out(tmp_path, {})
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    words = ("train", "r.toml", "--set", "train.steps=x")
    first = meshwright(*words, cwd=tmp_path, env=env | {"RANK": "0", "LOCAL_RANK": "0"})
    assert first.code == 2 and first.err.count("error: ") == 1
    second = env | {"RANK": "1", "LOCAL_RANK": "1"}
    only_rank = {name: value for name, value in second.items() if name != "LOCAL_RANK"}
    ended = "import os, signal, threading\nthreading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()"
    for env in (second, only_rank):
        result = meshwright(*words, cwd=tmp_path, env=env, before=ended)
        assert (result.code, result.err) == (-signal.SIGTERM, "")
    result = meshwright(*words, cwd=tmp_path, env=second, before=IMPATIENT)
    assert (result.code, result.err) == (2, first.err)


def test_the_command_trains_and_resumes_on_another_number_of_processes(meshwright, tmp_path) -> None:
    lay_out(tmp_path, {})
    words = ("train", "r.toml", "--run-dir", "run")
    assert meshwright(*words, "--nproc", "2", "--set", "train.stop_after=2", cwd=tmp_path).code == 0
    result = meshwright(*words, "--resume", cwd=tmp_path)
    assert (result.code, result.err) == (0, "")
    assert "resume: step 2 from run/checkpoints/step-00000002" in result.out
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    listed = meshwright("checkpoint", "ls", "run", cwd=tmp_path).out
    assert [line.split()[:3] for line in listed.splitlines()] == [["step", "3", "whole"], ["step", "2", "whole"]]


def test_closed_streams_are_no_error(meshwright, tmp_path) -> None:
    lay_out(tmp_path, {})
    save_tiny(tmp_path / "checkpoints", 1)
    done = run_shell("meshwright checkpoint ls . >&-", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    out = "import os, sys\nos.close(1)\nsys.stdout = None\n"
    for name, closed in (("one", out), ("both", f"{out}os.close(2)\nsys.stderr = None\n")):
        result = meshwright("train", "r.toml", "--run-dir", name, "--nproc", "2", cwd=tmp_path, before=closed)
        assert (result.code, result.out, result.err) == (0, "", "")
    assert summary_of(tmp_path / "one") == summary_of(tmp_path / "both")


def test_a_name_that_the_terminal_cannot_show_does_not_end_a_training(meshwright, tmp_path) -> None:
    lay_out(tmp_path, {})
    ascii_only = "import sys\nsys.stdout.reconfigure(encoding='ascii', errors='strict')"
    result = meshwright("train", "r.toml", "--run-dir", "läuf", cwd=tmp_path, before=ascii_only)
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("in l\\xe4uf\n") and summary_of(tmp_path / "läuf")["status"] == "done"


@pytest.mark.parametrize("name", ["with space", "-dash", "step-00000007"])
def test_a_run_folder_may_have_any_name(meshwright, tmp_path, name) -> None:
    lay_out(tmp_path, {})
    flag = [f"--run-dir={name}"]
    result = meshwright("train", "r.toml", *flag, cwd=tmp_path)
    assert (result.code, result.err) == (0, "")
    assert summary_of(tmp_path / name)["status"] == "done"
    again = meshwright("train", "r.toml", *flag, "--resume", cwd=tmp_path)
    assert again.code == 0 and "nothing to do" in again.out
    listed = meshwright("checkpoint", "ls", "--", name, cwd=tmp_path)
    assert listed.code == 0 and "whole" in listed.out
