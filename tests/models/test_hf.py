"""`[model] hf = PATH` on one process: what is built from a folder, and what is said of one that cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import huggingface_hub
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import meshwright
from meshwright.errors import CheckpointError, SpecError
from meshwright.models.anatomy import repeated_blocks, tied_groups
from meshwright.models.build import begin_model, build_model
from meshwright.models.built import Built, fill_whole
from meshwright.models.digest import state_items, weights_sha256
from meshwright.models.hf_config import hf_vocab_size
from meshwright.spec.sections import ModelSection
from models.tiny_hf import CONFIGS, LAYERS, TRANSLATED, VOCAB, drawn, loaded, write_config, write_model

SEQ_LEN = 24
BERT = {"model_type": "bert", "hidden_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": VOCAB}


def begun(folder: Path | str, seed: int = 0, seq_len: int = SEQ_LEN, **more: Any) -> Built:
    return begin_model(ModelSection(hf=str(folder)), seq_len=seq_len, seed=seed, **({"tokenizer_vocab": None} | more))


def build(folder: Path | str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    return build_model(ModelSection(hf=str(folder)), seq_len=SEQ_LEN, tokenizer_vocab=None, seed=seed, dtype=dtype)


def rewrite(folder: Path, change: Any) -> None:
    """Save the one file of a folder again, with other tensors."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_config_alone_gives_fresh_weights_that_only_the_seed_decides(tmp_path) -> None:
    folder = write_config(tmp_path, "llama", dtype="bfloat16")
    digest = weights_sha256(state_items(build(folder)))
    torch.rand(3)
    assert weights_sha256(state_items(build(folder))) == digest
    model = build(folder, seed=1)
    assert weights_sha256(state_items(model)) != digest
    assert model.training and model.config.use_cache is False
    assert {t.dtype for t in [*model.parameters(), *model.buffers()]} == {torch.float32}  # and not the config's


@pytest.mark.parametrize("name", CONFIGS)
def test_the_decoder_layers_are_the_blocks(tmp_path, name) -> None:
    blocks = [name for name, _ in repeated_blocks(build(write_config(tmp_path, name)))]
    assert len(blocks) == LAYERS and [block[-2:] for block in blocks] == [".0", ".1"]


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_that_transformers_reads_bit_by_bit(tmp_path, name, shard) -> None:
    folder = write_model(tmp_path, name, shard)
    assert (folder / "model.safetensors.index.json").exists() == (shard == "20KB")
    built = begun(folder)
    assert (built.fill is None) == (name in TRANSLATED)
    assert ["every rank reads all of it" in line for line in built.warnings] == [True] * (name in TRANSLATED)
    model = fill_whole(built).module
    wanted = loaded(folder)
    assert model.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_a_constructor_that_computes_with_its_weights_is_left_to_transformers(tmp_path, monkeypatch) -> None:
    from transformers import LlamaForCausalLM

    folder, build_it = write_model(tmp_path, "llama"), LlamaForCausalLM.__init__

    def computing(model: Any, config: Any) -> None:
        build_it(model, config)
        if (
            model.lm_head.weight.device.type == "meta" and not torch.empty(0).is_meta
        ):  # transformers' own way is meta too
            model.lm_head.weight.sum().item()

    monkeypatch.setattr(LlamaForCausalLM, "__init__", computing)
    built = begun(folder)
    assert built.fill is None and "every rank reads all of it" in built.warnings[0]
    assert torch.equal(built.module.lm_head.weight, loaded(folder)["lm_head.weight"])


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "llama tied"])
def test_before_they_are_read_parameters_have_no_memory_and_buffers_have_their_values(tmp_path, name) -> None:
    built, whole = begun(write_model(tmp_path, name)), build(tmp_path)
    assert all(parameter.is_meta for parameter in built.module.parameters())
    assert tied_groups(built.module) == tied_groups(whole) != []
    buffers = dict(built.module.named_buffers())
    assert buffers.keys() == dict(whole.named_buffers()).keys()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in whole.named_buffers())
    fill_whole(built)
    assert tied_groups(built.module) == tied_groups(whole)
    assert nn.Linear(2, 2).weight.device.type == "cpu"  # outside, modules are built as ever


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_become_masters_of_the_asked_type(tmp_path, dtype) -> None:
    folder = write_model(tmp_path, "llama", dtype=dtype)
    wanted = loaded(folder)
    for master in (torch.float32, torch.float64):
        model = build(folder, dtype=master)
        assert {t.dtype for t in [*model.parameters(), *model.buffers()]} == {master}
        assert all(torch.equal(tensor, wanted[name].to(master)) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_files_of_a_model_without_a_head_leave_out_its_prefix(tmp_path, name) -> None:
    base = drawn(write_config(tmp_path, name))
    base.base_model.save_pretrained(tmp_path)
    built = begun(tmp_path, seed=3)
    again = begun(tmp_path, seed=3)
    model, twin = fill_whole(built).module, fill_whole(again).module
    known, head = dict(base.named_parameters()), dict(model.named_parameters()).get("lm_head.weight")
    assert all(torch.equal(p, known[n]) for n, p in model.named_parameters() if n != "lm_head.weight")
    if name == "gpt2":  # tied, so that nothing is missing
        assert built.warnings == [] and head is None
        return
    assert built.warnings == ["no weights for lm_head.weight: the head starts from fresh ones"]
    assert head is not None and 0.01 < float(head.detach().std()) < 0.03  # initializer_range is 0.02
    assert torch.equal(head, dict(twin.named_parameters())["lm_head.weight"])


def test_what_the_model_does_not_have_is_left_out_with_a_line(tmp_path) -> None:
    folder = write_model(tmp_path, "gpt2")
    stray = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "score.weight": torch.ones(2, 36)}
    rewrite(folder, lambda tensors: tensors | stray)  # old gpt2 files hold their causal mask
    said = begun(folder).warnings
    assert said == ["1 tensors in the files are not the model's, and are left out: score.weight"]


def test_how_much_is_read_is_said(tmp_path) -> None:
    folder = write_model(tmp_path, "llama", "20KB")
    (line,) = begun(folder).lines
    files = len(list(folder.glob("*.safetensors")))
    assert files > 2 and line == f"weights: 21 tensors from {files} files in {folder}"


def test_a_tied_weight_that_the_files_hold_twice_must_be_one(tmp_path) -> None:
    folder = write_model(tmp_path, "qwen2")
    rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    assert torch.equal(build(folder).lm_head.weight, loaded(folder)["lm_head.weight"])
    rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    with pytest.raises(CheckpointError, match=r"lm_head.weight and model.embed_tokens.weight.*tie_word_embeddings"):
        build(folder)


def test_rows_longer_than_learned_positions_are_refused_and_rotary_ones_are_said(tmp_path) -> None:
    gpt2, llama = write_config(tmp_path / "a", "gpt2"), write_config(tmp_path / "b", "llama")
    assert begun(gpt2, seq_len=32).lines == begun(llama, seq_len=64).lines == []
    with pytest.raises(SpecError, match=r"^data.seq_len = 33: the model has 32 positions.*Nearest: 32\."):
        begun(gpt2, seq_len=33)
    assert begun(llama, seq_len=65).lines == [
        "positions: data.seq_len 65 is beyond the 64 that the model's config.json names"
    ]


def test_the_tokenizer_must_fit_the_vocabulary(tmp_path) -> None:
    folder = write_config(tmp_path, "llama")
    assert hf_vocab_size(str(folder)) == VOCAB
    begun(folder, tokenizer_vocab=VOCAB)
    with pytest.raises(SpecError, match=r"vocab_size 131 in its config.json, and data.tokenizer has 132 ids"):
        begun(folder, tokenizer_vocab=VOCAB + 1)


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def lose_a_file(folder: Path) -> None:
    sorted(folder.glob("model-*"))[1].unlink()


def lose_a_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight") is None)


def widen(folder: Path) -> None:
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"vocab_size": VOCAB + 6}))


def quantise(folder: Path) -> None:
    rewrite(folder, lambda t: t | {"lm_head.weight": t["lm_head.weight"].to(torch.int8)})


def of_another_model(folder: Path) -> None:
    save_file({"a.weight": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("shard", "spoil", "said"),
    [
        ("5GB", cut_short, ["model.safetensors", "cannot be read", "Copy"]),
        ("5GB", lose_a_tensor, ["lack 1 of the model's 21 tensors: model.layers.1.mlp.up_proj.weight"]),
        ("5GB", widen, ["lm_head.weight of shape (131, 36)", "config.json it has (137, 36)"]),
        ("5GB", quantise, ["lm_head.weight in I8", "BF16, F16, F32, F64"]),
        ("5GB", of_another_model, ["lack 20 of the model's 21 tensors"]),
        ("20KB", lose_a_file, ["lack 1 of the", "model-00002-of-", "Copy"]),
        ("20KB", lambda f: (f / "model.safetensors.index.json").write_text("{"), ["broken model.safetensors.index"]),
        ("20KB", lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {}}'), ["names none"]),
        (
            "20KB",
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}'),
            ["lack 1 of the 1 files", "../a"],
        ),
    ],
)
def test_weights_that_are_not_whole_or_not_the_models(tmp_path, shard, spoil, said) -> None:
    folder = write_model(tmp_path, "llama", shard)
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        build(folder)
    assert all(words in str(caught.value) for words in ["weights in", *said]), str(caught.value)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "adapter_model.safetensors", "model.gguf"])
def test_weights_in_another_form_are_refused_and_never_taken_for_none(tmp_path, file) -> None:
    folder = write_config(tmp_path, "llama")
    (folder / file).write_bytes(b"")
    with pytest.raises(SpecError, match=rf"holds {file}.*model\.safetensors.*runs its writer's code"):
        build(folder)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, ["has no config.json"]),
        ("{", ["reading config.json failed"]),
        ({"model_type": "no_such"}, ["reading config.json failed", "no_such"]),
        ({"model_type": "t5"}, ["is of type t5", "no causal language model"]),
        (BERT, ["BertLMHeadModel that sees the tokens it is to predict", "is_decoder"]),
        (
            BERT | {"architectures": ["BertForMaskedLM"]},
            ["is a BertForMaskedLM", "what is trained is a BertLMHeadModel", "architectures"],
        ),
        (CONFIGS["llama"] | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantised", "fp32"]),
        (CONFIGS["llama"] | {"hidden_act": "no_such"}, ["building it failed", "no_such"]),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}},
            ["needs code that comes with it", "auto_map", "not run"],
        ),
    ],
)
def test_configs_that_describe_nothing_to_train(tmp_path, config, said) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('code that came with the model was run')")
    if config is not None:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(SpecError) as caught:
        build(tmp_path)
    text = str(caught.value)
    assert text.startswith(f'model.hf = "{tmp_path}"') and "\n" not in text
    assert all(words in text for words in said), text


@pytest.mark.parametrize("path", ["./no/such", "/no/such", "a/b/c", "~/no-such-folder"])
def test_what_looks_like_a_path_is_not_looked_up_on_the_hub(path, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(SpecError, match="is no folder"):
        build(path)


def test_a_hub_id_is_fetched_without_pickles(tmp_path, monkeypatch) -> None:
    folder, asked = write_model(tmp_path / "cache", "gpt2"), []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    wanted = loaded(folder)
    assert all(torch.equal(t, wanted[n]) for n, t in build("someone/tiny").state_dict().items())
    ((name, patterns),) = asked
    assert name == "someone/tiny" and not any(".bin" in pattern or "*.py" in pattern for pattern in patterns)
    (folder / "model.safetensors").unlink()  # never fresh weights in place of ones that were asked for by name
    with pytest.raises(SpecError, match="no safetensors weights on the hub"):
        build("someone/tiny")


def test_a_hub_that_does_not_answer_is_one_line_with_the_way_round(tmp_path, monkeypatch) -> None:
    def fail(name: str, **_: Any) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(SpecError) as caught:
        build("someone/tiny")
    text = str(caught.value)
    assert text.startswith('model.hf = "someone/tiny": is no folder, and could not be fetched from the hub')
    assert "ConnectionError: no route to host" in text and "Give a folder" in text and "\n" not in text


def test_a_missing_package_is_said_with_the_way_to_get_it(tmp_path, monkeypatch) -> None:
    folder = write_config(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    with pytest.raises(SpecError, match=r"needs transformers.*meshwright\[hf\]"):
        build(folder)


def test_transformers_is_imported_only_for_its_models() -> None:
    for path in Path(meshwright.__file__).parent.rglob("*.py"):
        at_import = [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert not [line for line in at_import if line.split()[1].startswith(("transformers", "huggingface_hub"))], path
