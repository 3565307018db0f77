"""May a run start in this folder, and may this recipe continue what is in it?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import CheckpointError, SpecError
from meshwright.spec.load import from_table
from meshwright.spec.recipe import walk
from meshwright.train.run_folder import find_start
from train.runs import changed, save_tiny, tree_hash

LLAMA: dict[str, Any] = {
    "model": {"name": "llama", "n_layers": 2, "d_model": 32, "n_heads": 4},
    "data": {"seq_len": 8},
    "batch": {"global_batch_size": 8, "microbatch_size": 2},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "train": {"steps": 50},
    "validation": {"fraction": 0.1},
}
GPT2 = {**LLAMA, "model": {"name": "gpt2", "n_layers": 2, "d_model": 32, "n_heads": 4, "max_seq_len": 8}}
OWN = {**LLAMA, "model": {"build": "a.b:model", "width": 3}, "data": {"build": "a.b:rows", "length": 9, "workers": 1}}
TEXT = {**LLAMA, "data": {"source": "text", "path": "a.txt", "seq_len": 8}}
TOKENS = {**LLAMA, "data": {"source": "tokens", "path": "a.bin", "seq_len": 8}}
HF = {**LLAMA, "model": {"hf": "a/b"}}
TUNED = changed(LLAMA, batch={"tuned_global_batch_size": 16})
WSD = changed(LLAMA, schedule={"name": "wsd", "decay_steps": 5})
OWN_OPTIMIZER = {**LLAMA, "optimizer": {"build": "a.b:optimizer", "lr": 0.1}}

# Key, the recipe before, what changes, the old and the new value as they are printed.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("model.name", LLAMA, {"name": "gpt2"}, '"llama"', '"gpt2"'),
    ("model.hf", HF, {"hf": "a/c"}, '"a/b"', '"a/c"'),
    ("model.build", OWN, {"build": "a.b:other"}, '"a.b:model"', '"a.b:other"'),
    ("model.arguments", OWN, {"width": 4}, '{"width": 3}', '{"width": 4}'),
    ("model.n_layers", LLAMA, {"n_layers": 3}, "2", "3"),
    ("model.d_model", LLAMA, {"d_model": 64}, "32", "64"),
    ("model.n_heads", LLAMA, {"n_heads": 2}, "4", "2"),
    ("model.n_kv_heads", LLAMA, {"n_kv_heads": 2}, "not set", "2"),
    ("model.head_dim", LLAMA, {"head_dim": 10}, "not set", "10"),
    ("model.d_ff", LLAMA, {"d_ff": 99}, "not set", "99"),
    ("model.vocab_size", LLAMA, {"vocab_size": 300}, "not set", "300"),
    ("model.max_seq_len", GPT2, {"max_seq_len": 9}, "8", "9"),
    ("model.dropout", LLAMA, {"dropout": 0.2}, "0.0", "0.2"),
    ("model.tied_embeddings", LLAMA, {"tied_embeddings": True}, "not set", "true"),
    ("model.norm_eps", LLAMA, {"norm_eps": 1e-6}, "1e-05", "1e-06"),
    ("model.rope_theta", LLAMA, {"rope_theta": 500.0}, "10000.0", "500.0"),
    ("data.source", TEXT, {"source": "tokens"}, '"text"', '"tokens"'),
    ("data.build", OWN, {"build": "a.b:others"}, '"a.b:rows"', '"a.b:others"'),
    ("data.arguments", OWN, {"length": 10}, '{"length": 9}', '{"length": 10}'),
    ("data.path", TEXT, {"path": "b.txt"}, '"a.txt"', '"b.txt"'),
    ("data.tokenizer", TEXT, {"tokenizer": "t.json"}, "not set", '"t.json"'),
    ("data.token_dtype", TOKENS, {"token_dtype": "uint32"}, '"uint16"', '"uint32"'),
    ("data.seq_len", LLAMA, {"seq_len": 16}, "8", "16"),
    ("data.pack", LLAMA, {"pack": False}, "true", "false"),
    ("data.shuffle", LLAMA, {"shuffle": False}, "true", "false"),
    ("data.last_batch", LLAMA, {"last_batch": "keep"}, '"drop"', '"keep"'),
    ("data.workers", OWN, {"workers": 2}, "1", "2"),
    ("loss.build", LLAMA, {"build": "a.b:loss"}, "not set", '"a.b:loss"'),
    ("batch.global_batch_size", LLAMA, {"global_batch_size": 16}, "8", "16"),
    ("batch.tuned_global_batch_size", LLAMA, {"tuned_global_batch_size": 16}, "not set", "16"),
    ("optimizer.name", LLAMA, {"name": "adamw"}, '"sgd"', '"adamw"'),
    ("optimizer.build", OWN_OPTIMIZER, {"build": "a.b:c"}, '"a.b:optimizer"', '"a.b:c"'),
    ("optimizer.lr", LLAMA, {"lr": 0.2}, "0.1", "0.2"),
    ("optimizer.max_grad_norm", LLAMA, {"max_grad_norm": 1.0}, "not set", "1.0"),
    ("optimizer.lr_scaling", TUNED, {"lr_scaling": "sqrt"}, '"none"', '"sqrt"'),
    ("optimizer.groups", LLAMA, {"groups": [{"pattern": "*", "lr": 0.3}]}, "[]", '[{"pattern": "*", "lr": 0.3}]'),
    ("optimizer.options", LLAMA, {"momentum": 0.9}, "{}", '{"momentum": 0.9}'),
    ("schedule.name", LLAMA, {"name": "cosine"}, '"constant"', '"cosine"'),
    ("schedule.warmup_steps", LLAMA, {"warmup_steps": 2}, "0", "2"),
    ("schedule.decay_steps", WSD, {"decay_steps": 6}, "5", "6"),
    ("schedule.final_fraction", LLAMA, {"final_fraction": 0.5}, "0.0", "0.5"),
    ("precision.compute", LLAMA, {"compute": "fp64"}, '"fp32"', '"fp64"'),
    ("train.steps", LLAMA, {"steps": 60}, "50", "60"),
    ("train.seed", LLAMA, {"seed": 1}, "0", "1"),
    ("train.reduction", LLAMA, {"reduction": "exact"}, '"fast"', '"exact"'),
    ("train.on_nonfinite", LLAMA, {"on_nonfinite": "skip"}, '"stop"', '"skip"'),
    ("train.threads_per_rank", LLAMA, {"threads_per_rank": 2}, "1", "2"),
    ("validation.fraction", LLAMA, {"fraction": 0.2}, "0.1", "0.2"),
]  # fmt: skip

ALLOWED: list[tuple[str, dict[str, Any]]] = [
    ("batch.microbatch_size", {"microbatch_size": 4}),
    ("cluster.nodes", {"nodes": 2}),
    ("cluster.devices_per_node", {"devices_per_node": 4}),
    ("cluster.device", {"device": "H100-SXM"}),
    ("layout.dp_replicate", {"dp_replicate": 2}),
    ("layout.dp_shard", {"dp_shard": 2}),
    ("layout.zero_stage", {"dp_shard": 2, "zero_stage": 1}),
    ("layout.units", {"units": "layers.*"}),
    ("layout.tp", {"tp": 2}),
    ("layout.pp", {"pp": 2}),
    ("layout.tensor", {"tensor": {"layers.*": "column"}}),
    ("layout.pp_schedule", {"pp_schedule": "gpipe"}),
    ("layout.pp_chunks", {"pp_schedule": "interleaved1f1b", "pp_chunks": 3}),
    ("train.stop_after", {"stop_after": 30}),
    ("train.recompute", {"recompute": "full"}),
    ("train.sync", {"sync": "every"}),
    ("train.record_samples", {"record_samples": True}),
    ("train.timeout_s", {"timeout_s": 9.0}),
    ("validation.every_steps", {"every_steps": 5}),
    ("checkpoint.every_steps", {"every_steps": 5}),
    ("checkpoint.keep_last", {"keep_last": 5}),
    ("checkpoint.asynchronous", {"asynchronous": True}),
    ("record.tensorboard", {"tensorboard": True}),
    ("record.memory", {"memory": False}),
]


def start(folder: Path, table: dict[str, Any], resume: bool = True) -> Any:
    return find_start(folder, from_table(table), resume=resume, hashes=True)


@pytest.mark.parametrize(("key", "before", "change", "old", "new"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_decides_what_is_trained_may_not_change(tmp_path, key, before, change, old, new) -> None:
    save_tiny(tmp_path / "checkpoints", 20, recipe=before)
    assert start(tmp_path, before).step == 20
    untouched = tree_hash(tmp_path)
    with pytest.raises(SpecError) as caught:
        start(tmp_path, changed(before, **{key.partition(".")[0]: change}))
    assert f"{key} was {old}, now {new}" in str(caught.value)
    assert str(tmp_path / "checkpoints/step-00000020") in str(caught.value)
    assert "may change" in caught.value.nearest
    assert tree_hash(tmp_path) == untouched


@pytest.mark.parametrize(("key", "change"), ALLOWED, ids=[case[0] for case in ALLOWED])
def test_how_it_runs_may_change(tmp_path, key, change) -> None:
    save_tiny(tmp_path / "checkpoints", 20, recipe=LLAMA)
    table = changed(LLAMA, **{key.partition(".")[0]: change})
    then, now = ({path: value for path, value, _ in walk(from_table(t))} for t in (LLAMA, table))
    assert then[key] != now[key]
    assert start(tmp_path, table).step == 20


def test_every_key_of_a_recipe_is_in_one_of_the_two_tables() -> None:
    keys = {path: knob for path, _, knob in walk(from_table(LLAMA))}
    assert {key for key, *_ in REFUSED} == {path for path, knob in keys.items() if not knob}
    assert {key for key, _ in ALLOWED} == {path for path, knob in keys.items() if knob}


def test_several_changes_are_named_at_once(tmp_path) -> None:
    save_tiny(tmp_path / "checkpoints", 20, recipe=LLAMA)
    table = changed(LLAMA, optimizer={"lr": 1.0}, train={"seed": 7}, checkpoint={"keep_last": 1})
    with pytest.raises(SpecError, match=r"optimizer.lr was 0.1, now 1.0; train.seed was 0, now 7\."):
        start(tmp_path, table)


HELD = {
    "metrics.jsonl": '{"step": 1}\n',
    "summary.json": "{}",
    "recipe.toml": "",
    "checkpoints/step-00000001/manifest.json": "{}",
    "checkpoints/step-00000002": "a file of that name",
}


@pytest.mark.parametrize("name", HELD)
def test_a_folder_that_holds_a_run_is_refused_without_resume_and_untouched(tmp_path, name) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(HELD[name])
    before = tree_hash(tmp_path)
    with pytest.raises(SpecError, match=r"holds a run already \(.*Continue it with --resume"):
        start(tmp_path, LLAMA, resume=False)
    assert tree_hash(tmp_path) == before


@pytest.mark.parametrize("resume", [True, False])
def test_an_empty_folder_and_one_that_is_not_there_start_at_step_0(tmp_path, resume) -> None:
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    (tmp_path / "empty/notes.txt").write_text("mine")
    for folder in (tmp_path / "empty", tmp_path / "no/such/folder", tmp_path / "step-00000007"):
        found = start(folder, LLAMA, resume=resume)
        assert found.step == 0 and found.checkpoint is None
        assert len(found.lines) == resume
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("file", "is a file"),
        ("file/below", "file is a file"),
        ("file/below/it", "file is a file"),
        ("x" * 300, "File name too long"),
        ("nul\0byte", "is no path in UTF-8: embedded null byte"),
        ("\udcff", "is no path in UTF-8"),
        ("dangling", "is a file"),
    ],
)
@pytest.mark.parametrize("resume", [True, False])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path, name, words, resume) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SpecError, match=words) as caught:
        start(tmp_path / name, LLAMA, resume=resume)
    assert "--run-dir" in str(caught.value)


def test_a_link_to_a_folder_is_a_folder(tmp_path) -> None:
    save_tiny(tmp_path / "real/checkpoints", 5, recipe=LLAMA)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert start(tmp_path / "link", LLAMA).step == 5


def test_a_recipe_in_a_checkpoint_that_this_version_cannot_read_is_refused(tmp_path) -> None:
    strange = json.loads(json.dumps(LLAMA))
    strange["model"]["n_wings"] = 2
    save_tiny(tmp_path / "checkpoints", 20, recipe=strange)
    with pytest.raises((SpecError, CheckpointError), match=r"step-00000020.*\n.*model.n_wings"):
        start(tmp_path, LLAMA)
