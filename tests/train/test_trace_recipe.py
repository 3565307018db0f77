"""A recipe's model as a ModelSpec file, in this process and by the program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.errors import SpecError
from meshwright.spec.load import from_table
from meshwright.spec.model_file import spec_from_json
from meshwright.train.trace_recipe import main, trace_recipe
from models.tiny_hf import VOCAB, write_config, write_model

TOML = """
[model]
name = "llama"
n_layers = 2
d_model = 16
n_heads = 2
[data]
seq_len = 12
[batch]
global_batch_size = 4
[optimizer]
lr = 1e-3
[train]
steps = 1
"""


def table(model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    rest = {"batch": {"global_batch_size": 4}, "optimizer": {"lr": 1e-3}, "train": {"steps": 1}}
    return {"model": model, **rest, **sections}


def test_a_reference_model_takes_its_vocabulary_from_the_tokenizer() -> None:
    spec = trace_recipe(from_table(table({"name": "gpt2", "n_layers": 3, "d_model": 16, "n_heads": 2})), kernels="cuda")
    assert (spec.name, spec.vocab_size, spec.seq_len, spec.d_model, spec.n_layers) == ("gpt2", 256, 128, 16, 3)
    assert set(spec.units[0].saved) == {"none", "selective", "full"} and spec.compute == "fp32"


@pytest.mark.parametrize("write", [write_config, write_model], ids=["without weights", "with weights"])
def test_a_model_of_transformers_is_traced_without_memory(tmp_path, write) -> None:
    folder = write(tmp_path / "m", "qwen2")
    recipe = from_table(table({"hf": str(folder)}, data={"seq_len": 16}, precision={"compute": "bf16"}))
    spec = trace_recipe(recipe, kernels="cuda")
    assert "meta tensors" in spec.source and spec.n_layers == 2 and spec.tied
    assert spec.vocab_size == VOCAB and spec.embedding_parameters == VOCAB * 36


def test_a_data_set_and_a_loss_of_ones_own_give_bytes_a_sample() -> None:
    names = {"build": "train.small:Net"}, {"build": "train.small:Points", "size": 2, "workers": 0}
    recipe = from_table(
        table(names[0], data=names[1], loss={"build": "train.small:loss"}, precision={"compute": "fp64"})
    )
    spec = trace_recipe(recipe, kernels="cpu", microbatches=(3, 5))  # more than the data set has
    assert (spec.seq_len, spec.name, spec.compute) == (1, "train.small:Net", "fp64")
    rows = spec.before.per_token
    assert rows == 7 * 4 * 8 + 7 * 8  # points and their classes


def test_tokens_of_a_data_set_give_bytes_a_token(tmp_path, monkeypatch) -> None:
    (tmp_path / "rows_of_ids.py").write_text(
        "import torch\n"
        "def rows(length):\n"
        "    return [{'tokens': torch.zeros(length, dtype=torch.int64)} | {'labels': torch.zeros(length).long()}] * 3\n"
    )
    monkeypatch.chdir(tmp_path)
    model = {"name": "llama", "n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 11}
    data = {"build": "rows_of_ids:rows", "length": 9, "workers": 0}
    spec = trace_recipe(from_table(table(model, data=data)), kernels="cpu")
    assert spec.seq_len == 9 and spec.before.per_token == 16


def test_the_program_writes_a_file_that_reads_back(tmp_path) -> None:
    recipe, out = tmp_path / "r.toml", tmp_path / "m.json"
    recipe.write_text(TOML)
    before = torch.get_num_threads()
    try:
        words = [
            str(recipe),
            "--out",
            str(out),
            "--kernels",
            "cpu",
            "--set",
            "model.n_layers=5",
            "--microbatch",
            "4",
            "5",
        ]
        assert main(words) == 0
    finally:
        torch.set_num_threads(before)
    spec = spec_from_json(out.read_text())
    assert spec.n_layers == 5 and [path.name for path in tmp_path.iterdir() if "part" in path.name] == []
    assert spec == trace_recipe(from_table(_read(TOML, n_layers=5)), kernels="cpu", microbatches=(4, 5))


def _read(text: str, **model: Any) -> dict[str, Any]:
    import tomllib

    whole = tomllib.loads(text)
    return whole | {"model": whole["model"] | model}


def test_what_is_wrong_with_a_recipe_is_one_line_and_its_exit_code(tmp_path, capsys) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(TOML)
    words = [str(recipe), "--out", str(tmp_path / "m.json")]
    assert main([*words, "--set", "model.n_heads=3", "--set", "train.steps=-1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "n_heads" in lines[0] and "train.steps" in lines[0]
    assert not (tmp_path / "m.json").exists()


def test_a_model_that_cannot_be_built_says_so() -> None:
    with pytest.raises(SpecError, match="there is no module `nosuch`"):
        trace_recipe(from_table(table({"build": "nosuch:thing"})), kernels="cpu")
