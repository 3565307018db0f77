"""Recipe files: what is read, what overrides do, and files that are none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sound_recipes import PLAIN, SOUND, TABLES

from meshwright.errors import SpecError
from meshwright.spec.dump import to_table
from meshwright.spec.hints import paths, sections
from meshwright.spec.load import from_table, load, loads
from meshwright.spec.sections import LayoutSection


def test_defaults_and_types() -> None:
    recipe = loads(SOUND, ["optimizer.lr=1", "model.dropout=0"])
    assert (recipe.model.name, recipe.model.d_model, recipe.model.n_kv_heads) == ("llama", 64, None)
    assert recipe.optimizer.lr == 1.0 and isinstance(recipe.optimizer.lr, float)
    assert isinstance(recipe.model.dropout, float)
    assert recipe.layout == LayoutSection()
    assert recipe.data.seq_len == 128


def test_an_override_is_toml_or_a_string() -> None:
    overrides = ["train.steps = 7", "schedule.name=cosine", 'data.tokenizer="bytes"', "optimizer.betas=[0.8, 0.9]"]
    recipe = loads(SOUND, overrides)
    assert (recipe.train.steps, recipe.schedule.name, recipe.data.tokenizer) == (7, "cosine", "bytes")
    assert recipe.optimizer.options == {"betas": [0.8, 0.9]}


def test_an_override_cannot_smuggle_in_a_second_key() -> None:
    recipe = loads(SOUND, ["data.tokenizer=1\nother = 2"])
    assert recipe.data.tokenizer == "1\nother = 2"


def test_a_value_may_hold_an_equals_sign() -> None:
    assert loads(SOUND, ["data.tokenizer=a=b"]).data.tokenizer == "a=b"


def test_the_last_override_counts() -> None:
    assert loads(SOUND, ["train.seed=1", "train.seed=2"]).train.seed == 2


@pytest.mark.parametrize("text", ['layout = "hsdp2x4+tp2"\n' + SOUND, SOUND])
def test_a_layout_in_one_word(text: str) -> None:
    overrides = [] if "layout" in text else ["layout.pp_schedule=gpipe", "layout.pp=2", "layout=hsdp2x4+tp2"]
    layout = loads(text, overrides).layout
    assert layout == LayoutSection(
        dp_replicate=2, dp_shard=4, zero_stage=3, tp=2, pp=1, pp_schedule="gpipe" if overrides else "1f1b"
    )


def test_other_keys_beside_build_are_its_arguments() -> None:
    text = (
        SOUND.replace('name = "llama"', 'build = "pkg.nets:make"')
        + '[data]\nbuild = "pkg:rows"\nseq_len = 9\nroot = "x"'
    )
    recipe = loads(text)
    assert recipe.model.arguments == {"n_layers": 2, "d_model": 64, "n_heads": 4}
    assert recipe.data.arguments == {"root": "x"}
    assert recipe.data.seq_len == 9


def test_pp_schedule_without_pipeline_is_harmless() -> None:
    assert loads(SOUND, ["layout.pp_schedule=gpipe"]).layout.pp_schedule == "gpipe"


def test_a_tuned_batch_without_scaling_is_fine() -> None:
    assert loads(SOUND, ["batch.tuned_global_batch_size=32"]).batch.tuned_global_batch_size == 32


def test_a_table_is_not_changed_and_not_shared() -> None:
    betas = [0.9, 0.95]
    table = {
        "model": {"name": "llama"},
        "batch": {"global_batch_size": 4},
        "optimizer": {"lr": 1, "betas": betas},
        "train": {"steps": 2},
    }
    recipe = from_table(table)
    betas[0] = 7.0
    assert recipe.optimizer.options == {"betas": [0.9, 0.95]}
    assert table["optimizer"] == {"lr": 1, "betas": [7.0, 0.95]}


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b"\xef\xbb\xbf" + SOUND.replace("\n", "\r\n").encode())
    assert load(path, ["train.steps=3"]) == load(str(path), ["train.steps=3"]) == loads(SOUND, ["train.steps=3"])


def refusal(path: Path | str) -> str:
    with pytest.raises(SpecError) as caught:
        load(path)
    assert caught.value.__suppress_context__
    return str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(SOUND)
    assert "there is no such file" in refusal(tmp_path / "tinny.toml")
    assert f"Nearest: {tmp_path / 'tiny.toml'}" in refusal(tmp_path / "tinny.toml")
    assert "Nor is there a folder" in refusal(tmp_path / "no" / "r.toml")
    assert "is a folder" in refusal(tmp_path)
    assert "It holds tiny.toml" in refusal(tmp_path)
    assert "is no path" in refusal("a\0b")
    assert "cannot be read" in refusal(tmp_path / "tiny.toml" / "x")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b"[train]\nsteps = 3 # caf\xe9\n")
    assert "0xe9 at line 2, column 16" in refusal(path)


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("[train]\nsteps 3", ["line 2, column 7", 'There: "steps 3"']),
        ("[train]\nsteps = \n[model]", ["line 2", "There"]),
        ("[a]\n[a]", ["line 2"]),
        ("x = 'open", ["at end of document"]),
        ("x = " + "[" * 5000, ["is not TOML"]),
        ("x = " + "9" * 5000, ["is not TOML"]),
    ],
)
def test_text_that_is_no_toml(text: str, fragments: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        loads(text, where="r.toml")
    for fragment in ["r.toml: is not TOML", *fragments]:
        assert fragment in str(caught.value)


PATHS = st.sampled_from([*sections(), *paths()])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TABLES, st.dictionaries(PATHS, PLAIN | st.sampled_from(["llama", "wsd", "exact", "sgd", "text"]), max_size=4))
def test_any_table_is_a_recipe_or_refused_in_one_line_a_fault(table: dict[str, Any], changes: dict[str, Any]) -> None:
    changed = {name: dict(section) for name, section in table.items()}
    for path, value in changes.items():
        name, _, key = path.partition(".")
        if key and isinstance(changed.setdefault(name, {}), dict):
            changed[name][key] = value
        elif not key:
            changed[name] = value
    try:
        recipe = from_table(changed)
    except SpecError as error:
        assert len(error.faults) == len({str(fault) for fault in error.faults})
        assert all(fault.where and fault.rule for fault in error.faults)
    else:
        assert from_table(to_table(recipe)) == recipe


def test_the_room_imports_neither_torch_nor_a_toml_reader() -> None:
    names = [path.stem for path in Path(__file__, "../../../src/meshwright/spec").resolve().glob("*.py")]
    imports = "; ".join(f"import meshwright.spec.{name}" for name in names if name != "__init__")
    heavy = ("torch", "numpy", "tomllib", "tomli_w", "difflib", "json", "pydantic")
    code = f"import sys; {imports}; print([name for name in {heavy} if name in sys.modules])"
    source = str(Path(__file__, "../../../src").resolve())
    environment = os.environ | {"PYTHONPATH": source}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
