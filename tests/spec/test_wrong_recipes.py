"""Wrong recipes, and what the refusal must say: the key path, the rule with its numbers, the nearest that works."""

from __future__ import annotations

import pytest
from sound_recipes import SOUND

from meshwright.errors import SpecError
from meshwright.spec.load import loads

GPT2 = "model.name=gpt2"
EXACT = "train.reduction=exact"
WSD = "schedule.name=wsd"
SCALED = "optimizer.lr_scaling=linear"

# Overrides on a sound recipe; key path of the fault; fragments of its line.
CASES: list[tuple[list[str], str, list[str]]] = [
    # unknown sections and keys
    (["trian.steps=3"], "trian", ["no section", "Nearest: train"]),
    (["lr=3"], "lr", ["Nearest: optimizer.lr"]),
    (["zzz.q=1"], "zzz", ["Sections: model, data"]),
    (["model.nlayers=3"], "model.nlayers", ["no such key", "model.n_layers"]),
    (["batch.lr=3"], "batch.lr", ["Nearest: optimizer.lr"]),
    (["train.batch_size=3"], "train.batch_size", ["batch.global_batch_size", "batch.microbatch_size"]),
    (["batch_size=3"], "batch_size", ["batch.global_batch_size", "batch.microbatch_size"]),
    (["batch.batch_size=3"], "batch.batch_size", ["batch.global_batch_size", "batch.microbatch_size"]),
    (["batch.grad_accum_steps=3"], "batch.grad_accum_steps", ["derived", "global_batch_size / (dp_degree x"]),
    (["train.epochs=3"], "train.epochs", ["train.steps"]),
    (["train.seq_len=3"], "train.seq_len", ["Nearest: data.seq_len"]),
    (["train.weight_decay=3"], "train.weight_decay", ["Nearest: optimizer.weight_decay"]),
    (["optimizer.warmup_steps=3"], "optimizer.warmup_steps", ["Nearest: schedule.warmup_steps"]),
    (["optimizer.learning_rate=3"], "optimizer.learning_rate", ["Nearest: optimizer.lr"]),
    (["optimizer.weight_decy=3"], "optimizer.weight_decy", ["Nearest: optimizer.weight_decay"]),
    (["layout.nproc=3"], "layout.nproc", ["--nproc"]),
    (["model.hidden_size=3"], "model.hidden_size", ["Nearest: model.d_model"]),
    (["checkpoint.every=3"], "checkpoint.every", ["Nearest: checkpoint.every_steps"]),
    (["train.arguments=3"], "train.arguments", ["no such key"]),
    # types
    (["train.steps=10.0"], "train.steps", ["is 10.0", "whole number", "Nearest: 10."]),
    (["train.steps=10.5"], "train.steps", ["is 10.5", "Nearest: 10 or 11."]),
    (["train.steps='10'"], "train.steps", ["a string", "Nearest: 10, without quotes"]),
    (["train.steps=true"], "train.steps", ["is true", "a boolean"]),
    (["optimizer.lr=true"], "optimizer.lr", ["is true", "must be a number"]),
    (["optimizer.lr=fast"], "optimizer.lr", ['is "fast"', "must be a number"]),
    (["optimizer.lr=nan"], "optimizer.lr", ["is nan", "must be finite"]),
    (["optimizer.lr=inf"], "optimizer.lr", ["is inf", "must be finite"]),
    (["train.seed=9223372036854775808"], "train.seed", ["64 bits"]),
    (["data.shuffle=True"], "data.shuffle", ['is "True"', "true or false", "Nearest: true."]),
    (["data.shuffle=1"], "data.shuffle", ["is 1", "Nearest: true."]),
    (["model.name=[1]"], "model.name", ["is [1]", "a list", "must be a string"]),
    (["data.path=3", "data.source=text"], "data.path", ["is 3", 'Nearest: "3"']),
    (["train.steps=2020-01-01"], "train.steps", ["2020-01-01", "whole number"]),
    (["optimizer.groups=3"], "optimizer.groups", ["is 3", "list of tables", "pattern"]),
    (["batch=16"], "batch", ["is 16", "must be a table", "batch.global_batch_size = 16"]),
    (["data.path=''", "data.source=text"], "data.path", ["is empty"]),
    # limits and choices
    (["model.n_layers=0"], "model.n_layers", ["is 0", "at least 1", "Nearest: 1."]),
    (["optimizer.lr=-1"], "optimizer.lr", ["is -1", "at least 0.0"]),
    (["optimizer.max_grad_norm=0"], "optimizer.max_grad_norm", ["is 0", "above 0.0"]),
    (["model.dropout=1"], "model.dropout", ["is 1", "below 1.0"]),
    (["validation.fraction=0.95"], "validation.fraction", ["is 0.95", "at most 0.9", "Nearest: 0.9"]),
    (["layout.zero_stage=4"], "layout.zero_stage", ["is 4", "at most 3", "Nearest: 3"]),
    (["precision.compute=BF16"], "precision.compute", ["fp32, bf16", 'Nearest: "bf16"']),
    (["model.name=lama"], "model.name", ["llama, gpt2", 'Nearest: "llama"']),
    (["schedule.name=cosin"], "schedule.name", ["constant, linear, cosine, wsd", 'Nearest: "cosine"']),
    (["optimizer.name=adamww"], "optimizer.name", ["sgd, adam, adamw", 'Nearest: "adamw"']),
    # the model
    (["model.hf=x"], "model", ["name and hf are given", "exactly one"]),
    ([GPT2, "model.n_kv_heads=2"], "model.n_kv_heads", ["gpt2 has no such key", "llama has"]),
    ([GPT2, "model.head_dim=16"], "model.head_dim", ["gpt2 has no such key"]),
    ([GPT2, "model.rope_theta=10000.0"], "model.rope_theta", ["gpt2 has no such key"]),
    (["model.max_seq_len=128"], "model.max_seq_len", ["llama has no such key", "gpt2 has"]),
    ([GPT2, "model.n_heads=5"], "model.n_heads", ["64 % 5 = 4", "n_heads 4 or 8", "d_model 60 or 65"]),
    (["model.n_heads=6"], "model.n_heads", ["64 % 6 = 4", "n_heads 4 or 8"]),
    (["model.n_kv_heads=3"], "model.n_kv_heads", ["4 % 3 = 1", "Nearest: 2 or 4"]),
    (["model.head_dim=7"], "model.head_dim", ["is 7", "Nearest: 6 or 8"]),
    (["model.n_heads=64"], "model.n_heads", ["head_dim 1", "n_heads 32"]),
    (["model.d_model=12"], "model.n_heads", ["head_dim 3", "n_heads 3 or 6"]),
    ([GPT2, "model.max_seq_len=64"], "model.max_seq_len", ["is 64", "data.seq_len 128", "Nearest: 128"]),
    (["model.vocab_size=255"], "model.vocab_size", ["is 255", "256 ids", "Nearest: 256"]),
    # the data
    (["data.source=text"], "data.path", ["required", '"text"']),
    (["data.source=tokens"], "data.path", ["required", '"tokens"']),
    (["data.source=text", "data.build=a:b"], "data.source", ["beside data.build", "one of the two"]),
    (["data.path=x"], "data.path", ["python-stdlib", 'source = "text"']),
    (["data.build=a:b", "data.path=x"], "data.path", ["beside data.build", "root"]),
    (["data.build=a:b", "data.tokenizer=bytes"], "data.tokenizer", ["means nothing to build"]),
    (["data.token_dtype=uint16"], "data.token_dtype", ["means nothing to python-stdlib", "tokens"]),
    (["data.source=tokens", "data.path=x", "data.pack=false"], "data.pack", ["where its documents end"]),
    (["data.build=pkg.mod.f"], "data.build", ["package.module:function", '"pkg.mod:f"']),
    (["data.build=pkg/mod.py:f"], "data.build", ["package.module:function"]),
    (["data.build=a:b", "data.since=2020-01-01"], "data.since", ["2020-01-01", "a date", 'Nearest: "2020-01-01"']),
    (["data.build=a:b", "data.x=[1, nan]"], "data.x[1]", ["is nan", "must be finite"]),
    (["loss.build=f"], "loss.build", ['is "f"', "package.module:function"]),
    # optimizer, learning rate and schedule
    (["optimizer.name=sgd", "optimizer.nesterov=true"], "optimizer.nesterov", ["momentum above 0", "momentum = 0.9"]),
    (["optimizer.momentum=0.9"], "optimizer.momentum", ["no option of adamw", "sgd"]),
    (["optimizer.betas=[0.9]"], "optimizer.betas", ["is [0.9]", "list of 2", "[0.9, 0.999]"]),
    (["optimizer.name=muon"], "optimizer.name", ["2-D", "1-D", '"adamw"']),
    (
        ["optimizer.fused=true", EXACT, "train.threads_per_rank=4"],
        "optimizer.fused",
        ["train.reduction exact", "4 threads", "threads_per_rank = 1"],
    ),
    (["optimizer.name=adafactor", EXACT], "optimizer.name", ["elementwise", '"adamw"', 'reduction = "fast"']),
    (["optimizer.build=a.b:c", EXACT], "optimizer.build", ["a.b:c", "elementwise", "sgd", '"adamw"']),
    (["optimizer.name=adafactor", "layout.dp_shard=2"], "optimizer.name", ["whole matrices", "dp_shard = 2", "adamw"]),
    ([SCALED], "batch.tuned_global_batch_size", ["required", "linear", "16"]),
    (["schedule.warmup_steps=101"], "schedule.warmup_steps", ["is 101", "train.steps 100", "Nearest: 100"]),
    ([WSD, "schedule.warmup_steps=95"], "schedule.decay_steps", ["95", "10, a tenth", "105", "decay_steps 5"]),
    ([WSD, "schedule.decay_steps=101"], "schedule.decay_steps", ["101", "more than train.steps 100"]),
    (["schedule.decay_steps=5"], "schedule.decay_steps", ["means nothing to constant", "wsd"]),
    # the run
    (["train.stop_after=101"], "train.stop_after", ["is 101", "train.steps 100", "Nearest: 100"]),
    (["validation.every_steps=5"], "validation.fraction", ["is 0.0", "every_steps 5", "0.1"]),
    (["precision.compute=fp16", EXACT], "precision.compute", ["exact", '"bf16"']),
    # layout and batch
    (["layout.zero_stage=3"], "layout.zero_stage", ["is 3", "dp_shard = 1", "dp_shard = 2"]),
    (["layout.zero_stage=0", "layout.dp_shard=2"], "layout.zero_stage", ["is 0", "dp_shard = 2", "dp_replicate = 2"]),
    (["batch.microbatch_size=3"], "batch.global_batch_size", ["16 / (1 data-parallel rank x", "2 or 4", "15 or 18"]),
    (
        ["batch.microbatch_size=4", "layout.dp_replicate=8"],
        "batch.global_batch_size",
        ["= 0.5", "microbatch_size 2;", "4 ranks", "size 32"],
    ),
    (["layout.dp_shard=3"], "batch.global_batch_size", ["16 / (3", "5.333", "2 or 4 ranks"]),
    (['layout="zero0x2"'], 'layout "zero0x2"', ["stage 0", "`zero3x2`"]),
    (["layout=zerox2"], 'layout "zerox2"', ["no part", "zero", "x2`"]),
    # overrides themselves
    (["train.steps"], "--set train.steps", ["key=value"]),
    (["=3"], "--set =3", ["key=value"]),
    (["train..steps=3"], "--set train..steps=3", ["key=value"]),
    (["train.steps.x=3"], "--set train.steps.x=3", ["train.steps is 100, not a table"]),
]


@pytest.mark.parametrize(("overrides", "where", "fragments"), CASES, ids=[" ".join(case[0]) for case in CASES])
def test_one_fault_with_its_path_its_numbers_and_the_nearest(
    overrides: list[str], where: str, fragments: list[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        loads(SOUND, overrides, where="r.toml")
    (fault,) = caught.value.faults
    assert fault.where == where
    for fragment in fragments:
        assert fragment in str(fault)
    assert str(caught.value) == f"r.toml: 1 fault\n  {fault}"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "wheres"),
    [
        ("", ["batch.global_batch_size", "optimizer.lr", "train.steps", "model"]),
        ('[model]\nhf = "x"\nn_layers = 2\ndropout = 0.1', ["model.dropout", "model.n_layers"]),
        ('[model]\nname = "gpt2"\nn_kv_heads = 2\nhead_dim = 4', ["model.n_kv_heads", "model.head_dim"]),
        ('[model]\nbuild = "a.b"', ["model.build"]),
        ('[model]\nbuild = "a:b"\nhf = "x"\nname = "llama"', ["model"]),
        ("[[model]]\nname = 'llama'", ["model"]),
    ],
)
def test_faults_of_a_bare_file(text: str, wheres: list[str]) -> None:
    required = {"batch.global_batch_size", "optimizer.lr", "train.steps"}
    with pytest.raises(SpecError) as caught:
        loads(text)
    found = [fault.where for fault in caught.value.faults]
    assert required <= set(found)
    assert [where for where in found if where in wheres] == wheres
    assert set(found) == required | set(wheres)


def test_every_fault_at_once_and_no_echo_of_a_bad_key() -> None:
    text = """
    learning_rate = 1
    [model]
    name = "llama"
    n_heads = "four"
    n_kv_heads = 3
    [batch]
    global_batch_size = 10
    microbatch_size = 4
    [optimizer]
    lr = -1
    betas = [2, 0.9]
    [train]
    steps = 10
    stop_after = 20
    [schedule]
    warmup_steps = 30
    name = "cosin"
    """
    with pytest.raises(SpecError) as caught:
        loads(text, where="x.toml")
    assert [fault.where for fault in caught.value.faults] == [
        "learning_rate",
        "model.n_heads",
        "optimizer.lr",
        "schedule.name",
        "optimizer.betas[0]",
        "schedule.warmup_steps",
        "train.stop_after",
        "batch.global_batch_size",
    ]
    lines = str(caught.value).splitlines()
    assert lines[0] == "x.toml: 8 faults"
    assert len(lines) == 9 and all(line.startswith("  ") for line in lines[1:])
