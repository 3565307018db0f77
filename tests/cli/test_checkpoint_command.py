"""`meshwright checkpoint`: what it prints about whole and torn checkpoints, and what it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from meshwright.cli.main import main
from meshwright.train import stored
from train.runs import TINY_RECIPE, save_tiny, tree_hash


@pytest.fixture
def run(tmp_path) -> Path:
    """Steps 5, 10 and 20; 10 has another byte, 20 no manifest."""
    for step in (5, 10, 20):
        save_tiny(tmp_path / "run/checkpoints", step)
    (tmp_path / "run/checkpoints/step-00000020/manifest.json").unlink()
    model = tmp_path / "run/checkpoints/step-00000010/model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\x7f")
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def nothing_changes(run):
    """Looking changes nothing, whatever the outcome."""
    before = tree_hash(run)
    yield
    assert tree_hash(run) == before


def command(capsys, *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_ls_lists_newest_first_and_says_what_is_torn(run, capsys) -> None:
    code, out, err = command(capsys, "checkpoint", "ls", run)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in lines] == [
        ["step", "20", "torn"],
        ["step", "10", "whole"],
        ["step", "5", "whole"],
    ]
    assert "has no manifest.json" in lines[0]
    assert lines[2].endswith(f"{run}/checkpoints/step-00000005") and "single" in lines[2] and "MB" in lines[2]
    listed = json.loads(command(capsys, "checkpoint", "ls", run, "--json")[1])
    assert [(row["step"], row["state"]) for row in listed] == [(20, "torn"), (10, "whole"), (5, "whole")]
    assert listed[2]["bytes"] == sum(
        (run / "checkpoints/step-00000005" / n).stat().st_size for n in (stored.MODEL, stored.OPTIMIZER)
    )


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/step-00000005"])
def test_a_run_its_checkpoints_or_one_of_them_may_be_named(run, capsys, where) -> None:
    code, out, _ = command(capsys, "checkpoint", "ls", run / where, "--json")
    steps = [row["step"] for row in json.loads(out)]
    assert (code, steps) == (0, [5] if where.endswith("5") else [20, 10, 5])


def test_ls_of_a_folder_without_checkpoints_says_so(tmp_path, capsys) -> None:
    assert command(capsys, "checkpoint", "ls", tmp_path / "..")[0] == 0
    (tmp_path / "empty").mkdir()
    assert command(capsys, "checkpoint", "ls", tmp_path / "empty")[:2] == (0, f"no checkpoints in {tmp_path}/empty\n")
    assert command(capsys, "checkpoint", "ls", tmp_path / "empty", "--json")[1] == "[]\n"


def test_verify_reads_every_byte_and_fails_if_one_is_wrong(run, capsys) -> None:
    code, out, _ = command(capsys, "checkpoint", "verify", run)
    assert code == 5
    assert [line.split()[0] for line in out.splitlines()] == ["torn", "torn", "whole"]
    assert "model.safetensors that differs from its SHA-256" in out
    good = run / "checkpoints/step-00000005"
    assert command(capsys, "checkpoint", "verify", good)[0] == 0
    listed = json.loads(command(capsys, "checkpoint", "verify", run, "--json")[1])
    assert [row["whole"] for row in listed] == [False, False, True]


def test_show_prints_the_newest_good_one_and_says_on_stderr_what_it_passed_by(run, capsys) -> None:
    code, out, err = command(capsys, "checkpoint", "show", run, "--json")
    manifest = json.loads(out)
    assert (code, manifest["step"], manifest["recipe"]) == (0, 10, TINY_RECIPE)
    assert re.fullmatch(r"passed by: checkpoint .*step-00000020: has no manifest.json\.\n", err)
    text = command(capsys, "checkpoint", "show", run / "checkpoints/step-00000005")[1]
    for words in ("step            5", "model.safetensors", '[optimizer] name = "adamw", lr = 0.001', "weights_sha256"):
        assert words in text


def test_digest_prints_one_word_on_stdout(run, capsys) -> None:
    code, out, err = command(capsys, "checkpoint", "digest", run / "checkpoints/step-00000005")
    manifest = json.loads((run / "checkpoints/step-00000005/manifest.json").read_text())
    assert (code, out, err) == (0, manifest["weights_sha256"] + "\n", "")
    code, out, err = command(capsys, "checkpoint", "digest", run)
    assert (
        code == 0
        and re.fullmatch(r"[0-9a-f]{64}\n", out)
        and out.strip() != json.loads((run / "checkpoints/step-00000010/manifest.json").read_text())["weights_sha256"]
    )  # of the bytes that are there
    assert "passed by" in err


def test_export_passes_by_what_its_hashes_do_not_vouch_for(run, tmp_path, capsys) -> None:
    output = tmp_path / "out/weights.safetensors"
    code, out, err = command(capsys, "checkpoint", "export", run, "--output", output)
    assert (code, err.count("passed by")) == (0, 2)
    assert out.startswith(f"{output}: weights of step 5, sha256 ")
    assert {float(x) for x in load_file(output)["weight"].flatten()} == {5.0}
    assert [path.name for path in output.parent.iterdir()] == [output.name]


@pytest.mark.parametrize("action", ["show", "digest", "export"])
def test_one_torn_checkpoint_named_by_itself_is_an_error(run, tmp_path, capsys, action) -> None:
    torn = run / "checkpoints/step-00000010"
    more = ("--output", tmp_path / "o") if action == "export" else ()
    (tmp_path / "copy").mkdir()
    cut = tmp_path / "copy/step-00000010"
    cut.mkdir()
    for path in torn.iterdir():
        (cut / path.name).write_bytes(path.read_bytes())
    (cut / stored.MODEL).unlink()
    code, out, err = command(capsys, "checkpoint", action, cut, *more)
    assert (code, out) == (5, "") and "lacks model.safetensors" in err
    if action == "export":
        code, out, err = command(capsys, "checkpoint", action, torn, *more)
        assert (code, out) == (5, "") and "differs from its SHA-256" in err
        assert not (tmp_path / "o").exists()


def test_a_copy_under_another_name_is_still_a_checkpoint(run, tmp_path, capsys) -> None:
    best = tmp_path / "best"
    best.mkdir()
    for path in (run / "checkpoints/step-00000005").iterdir():
        (best / path.name).write_bytes(path.read_bytes())
    assert command(capsys, "checkpoint", "verify", best)[0] == 0
    assert json.loads(command(capsys, "checkpoint", "show", best, "--json")[1])["step"] == 5


def test_a_run_folder_with_a_checkpoint_s_name_is_a_run_folder(tmp_path, capsys) -> None:
    folder = tmp_path / "step-00000007"
    save_tiny(folder / "checkpoints", 3)
    assert [row["step"] for row in json.loads(command(capsys, "checkpoint", "ls", folder, "--json")[1])] == [3]
