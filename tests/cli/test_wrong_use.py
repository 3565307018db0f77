"""A table of mistakes, each made with the real command: code, words, no traceback, nothing on disk touched."""

from __future__ import annotations

from typing import Any

import pytest

from cli.wrong import IMPATIENT, RECIPE, Wrong, check, lay_out, train
from train.runs import TINY_RECIPE, save_tiny, tree_hash

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
TEXT = ("data.build=", "data.workers=")
LLAMA = '[model]\nname = "llama"\nn_layers = 1\nd_model = 16\nn_heads = 2\n[data]\nseq_len = 8\n%s\n' + (
    "[batch]\nglobal_batch_size = 12\n[optimizer]\nlr = 0.1\n[train]\nsteps = 3\n"
)


def own_optimizer(build: str) -> str:
    return RECIPE.replace('name = "sgd"', f'build = "{build}"')


NO_TENSORBOARD = """
import sys
for name in [*sys.modules]:
    if name.startswith("tensorboard"):
        del sys.modules[name]
sys.modules["tensorboard"] = None
"""

COMMAND_LINE = {
    "no command": Wrong((), 2, ("required: COMMAND", "--help")),
    "unknown command": Wrong(("trian", "r.toml"), 2, ("'trian'", "'plan', 'train', 'cluster'", "Nearest: train")),
    "unknown flag": Wrong(("train", "r.toml", "--nprocs", "2"), 2, ("--nprocs", "Nearest: --nproc")),
    "shortened flag": Wrong(("train", "r.toml", "--res"), 2, ("unrecognized arguments: --res",)),
    "unknown action": Wrong(("checkpoint", "lss", "."), 2, ("'lss'", "Nearest: ls")),
    "no recipe": Wrong(("train",), 2, ("RECIPE.toml", "meshwright train --help")),
    "nproc a word": Wrong(("train", "r.toml", "--nproc", "two"), 2, ("--nproc", "'two'")),
    "nproc 1.5": Wrong(("train", "r.toml", "--nproc", "1.5"), 2, ("--nproc", "'1.5'")),
    "missing recipe": Wrong(("train", "rr.toml"), 2, ("rr.toml: there is no such file", "Nearest: r.toml")),
    "folder as recipe": Wrong(("train", "."), 2, ("is a folder; a recipe is one TOML file", "r.toml")),
    "recipe in no folder": Wrong(("train", "no/r.toml"), 2, ("no such file", "Nor is there a folder no")),
    "set without value": train("train.steps", says=("--set train.steps", "key=value")),
    "export without output": Wrong(("checkpoint", "export", "."), 2, ("--output",)),
    "resume of what": Wrong(("train", "r.toml", "--resume"), 2, ("--resume", "needs the run folder", "--run-dir")),
}

RECIPES = {
    "not TOML": train(says=("r.toml: is not TOML", "line 1", "this is"), files={"r.toml": "this is no recipe"}),
    "not UTF-8": train(says=("is not UTF-8: byte 0xff", "Save it as UTF-8"), files={"r.toml": b"# \xff"}),
    "empty": train(says=("r.toml: 4 faults", "optimizer.lr", "train.steps", "model"), files={"r.toml": ""}),
    "unknown section": train("trian.steps=3", says=("trian: is no section", "Nearest: train")),
    "unknown key": train("train.stpes=3", says=("train.stpes: ", "Nearest: train.steps")),
    "one batch size": train("batch.batch_size=3", says=("batch.batch_size", "batch.global_batch_size (samples per")),
    "epochs": train("train.epochs=3", says=("train.epochs", "counts optimizer steps")),
    "wrong type": train("train.steps=three", says=("train.steps", '"three"', "whole number")),
    "out of limits": train("optimizer.lr=-1", says=("optimizer.lr", "is -1", "at least 0")),
    "unknown choice": train("precision.compute=BF16", says=("precision.compute", 'Nearest: "bf16"')),
    "unknown optimizer": train("optimizer.name=adamww", says=("optimizer.name", 'Nearest: "adamw"')),
    "rule across keys": train("train.stop_after=9", says=("train.stop_after", "is 9", "train.steps 3")),
    "several": train("optimizer.lr=-1", "train.seed=x", says=("2 faults", "optimizer.lr", "train.seed")),
    "form of build": train("model.build=mine.model", says=("model.build", "package.module:function", '"mine:model"')),
}

LAYOUTS = {
    "nproc 0": train("--nproc", "0", says=("--nproc 0", "at least 1 process", "Nearest: --nproc 1")),
    "nproc -1": train("--nproc", "-1", says=("--nproc -1", "at least 1 process", "Nearest: --nproc 1")),
    "12 over 4 ranks of 2": train(
        "--nproc", "4", says=("batch.global_batch_size", "12 / (4", "1.5", "3 or 6 ranks", "Nearest")
    ),
    "product": train("--nproc", "3", "layout.dp_replicate=2", says=("= 2, not 3 processes", "--nproc 2")),
    "stage 0 cut": train("layout.zero_stage=0", "layout.dp_shard=2", says=("zero_stage", "is 0", "dp_shard = 2")),
    "stage 3 uncut": train("layout.zero_stage=3", says=("zero_stage", "is 3", "dp_shard = 1")),
    "no layout word": train("layout=zerox2", says=('layout "zerox2"', "zero")),
    "tp": train("layout.tp=2", says=("layout.tp = 2", "how Linear is cut", "[layout.tensor]")),
    "pp": train("layout.pp=2", says=("a pipeline of Linear", "is a chain", "layout.pp = 1")),
    "hf": train(
        "model.hf=gpt2",
        says=(
            "model: hf and build are given",
            "exactly one of name, hf and build",
        ),
    ),
    "asynchronous": train("checkpoint.asynchronous=true", says=("checkpoint.asynchronous", "Nearest: false")),
}

ENVIRONMENTS = {
    "rank alone": train(env={"RANK": "0"}, says=("RANK=0 is set and WORLD_SIZE is not", "torchrun")),
    "world alone": train(env={"WORLD_SIZE": "2"}, says=("WORLD_SIZE=2 is set and RANK is not",)),
    "local rank alone": train(env={"LOCAL_RANK": "0"}, says=("LOCAL_RANK=0 is set and RANK and WORLD_SIZE is not",)),
    "rank too high": train(
        env={"RANK": "2", "WORLD_SIZE": "2", **MASTER}, before=IMPATIENT, says=("RANK=2 is not below WORLD_SIZE=2",)
    ),
    "rank a word": train(env={"RANK": "first", "WORLD_SIZE": "2"}, says=("RANK='first' is not an integer",)),
    "no meeting point": train(env={"RANK": "0", "WORLD_SIZE": "2"}, says=("MASTER_ADDR is not set", "2 ranks")),
    "no port": train(
        env={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "99999"}, says="MASTER_PORT=99999"
    ),
    "local world": train(
        env={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", **MASTER},
        says=("LOCAL_WORLD_SIZE=3 is above WORLD_SIZE=2",),
    ),
    "Slurm": train(env={"SLURM_NTASKS": "4"}, says=("SLURM_NTASKS=4", "would train alone", "srun torchrun")),
    "nproc against world": train(
        "--nproc", "3", env={"RANK": "0", "WORLD_SIZE": "2", **MASTER}, says=("nproc = 3 (--nproc)", "WORLD_SIZE=2")
    ),
}

MODELS = {
    "no module": train("model.build=mein:model", says=('model.build = "mein:model"', "no module `mein`", "`mine`")),
    "no function": train("model.build=mine:modl", says=("has no `modl`", "Did you mean `model`")),
    "no callable": train("model.build=mine:not_callable", says=("type int and cannot be called",)),
    "raises": train("model.build=mine:raises", says=("failed: ValueError: no such size (mine.py:",)),
    "returns None": train("model.build=mine:returns_none", says=("returned None", "without `return`")),
    "returns a class": train("model.build=mine:returns_class", says=("the class Linear", "Return Linear(...)")),
    "returns a pair": train(
        "model.build=mine:returns_pair", says=("returned a value of type tuple", "Return the model alone")
    ),
    "unknown argument": train(
        "model.build=mine:sized", "model.width=4", "model.dept=3", says=("no argument `dept`", "`depth`")
    ),
    "missing argument": train("model.build=mine:sized", says=("needs `width`", "Add width = ... to [model]")),
    "on meta": train("model.build=mine:on_meta", says=("`weight` is on the meta device",)),
    "lazy": train("model.build=mine:lazy", says=("has no shape yet",)),
    "frozen": train("model.build=mine:frozen", says=("the model: has no trainable parameter (2 in all)",)),
    "exits": train("model.build=mine:exits", says=("failed: SystemExit: not here",)),
    "wrapped": train("model.build=mine:parallel", says=("is wrapped by DataParallel already", "the bare module")),
    "syntax": train(says=("SyntaxError", "mine.py:1"), files={"mine.py": "def model(:"}),
    "import raises": train(
        says=("importing `mine` failed: ZeroDivisionError", "mine.py:1"), files={"mine.py": "1 / 0"}
    ),
    "import exits": train(says=("SystemExit", "__main__"), files={"mine.py": "import sys; sys.exit(2)"}),
    "missing dependency": train(
        says=("importing `mine` failed: ModuleNotFoundError",), files={"mine.py": "import nosuch"}
    ),
    "ranks build others": train(
        "--nproc",
        "2",
        "model.build=mine:seeded_by_rank",
        code=4,
        says=("weights before the first step", "differ between ranks"),
    ),
    "group matches nothing": train(
        'optimizer.groups=[{pattern="*norm*", lr=0.1}]',
        says=("optimizer.groups[0].pattern", "Names look like bias, weight"),
    ),
    "no optimizer": train(files={"r.toml": own_optimizer("mine:no_optimizer")}, says=("optimizer", "made a NoneType")),
    "optimizer's argument": train(files={"r.toml": own_optimizer("mine:picky")}, says=("optimizer picky", "colour")),
}

DATA = {
    "iterator": train("data.build=mine:iterator", code=4, says=("is not map-style", "__getitem__")),
    "number": train("data.build=mine:number", code=4, says=("data set int: is not map-style",)),
    "empty": train("data.build=mine:empty", code=4, says=("data set list: is empty",)),
    "fewer than a batch": train(
        "batch.global_batch_size=48",
        code=4,
        says=("24 samples", "no whole global batch of 48", "global_batch_size = 24"),
    ),
    "no held-out sample": train(
        "validation.fraction=0.01", code=4, says=("24 x 0.01 = 0 whole samples", "Nearest that works: 0.04")
    ),
    "text missing": train(
        code=4,
        says=("data.path = 'boks.txt'", "Nearest that exists: books.txt"),
        files={"r.toml": LLAMA % 'source = "text"\npath = "boks.txt"', "books.txt": "once upon a time"},
    ),
    "text too short": train(
        code=4,
        says=("holds no row", "data.seq_len = 8", "Nearest that works: data.seq_len = 3"),
        files={"r.toml": LLAMA % 'source = "text"\npath = "s.txt"', "s.txt": "abc"},
    ),
    "text of few rows": train(
        code=4,
        says=("an epoch of 3 samples", "no whole global batch of 12"),
        files={"r.toml": LLAMA % 'source = "text"\npath = "s.txt"', "s.txt": "a" * 30},
    ),
    "tokens missing": train(
        code=4,
        says=("data.path = 'ids.bin'", "is no file"),
        files={"r.toml": LLAMA % 'source = "tokens"\npath = "ids.bin"'},
    ),
    "tokens of odd length": train(
        code=4,
        says=("has 7 bytes", "uint16 ids of 2 bytes", "data.token_dtype"),
        files={"r.toml": LLAMA % 'source = "tokens"\npath = "ids.bin"', "ids.bin": b"1234567"},
    ),
    "tokens too short": train(
        code=4,
        says=("holds no row: 4 tokens",),
        files={"r.toml": LLAMA % 'source = "tokens"\npath = "i"', "i": b"12345678"},
    ),
}

FOLDERS = {
    "run-dir a file": train(says=("run folder run: is a file",), files={"run": ""}),
    "run-dir below a file": Wrong(("train", "r.toml", "--run-dir", "f/run"), 2, ("f is a file",), {"f": ""}),
    "run-dir too long": Wrong(("train", "r.toml", "--run-dir", "r" * 300), 2, ("File name too long",)),
    "unwritable": Wrong(("train", "r.toml", "--run-dir", "/proc/nope"), 5, ("/proc/nope", "cannot be written")),
    "holds a run": train(
        says=("run folder run: holds a run already (metrics.jsonl)", "--resume"), files={"run/metrics.jsonl": ""}
    ),
    "all torn": train(
        "--resume",
        code=5,
        says=("no whole checkpoint", "step-00000007", "Nothing was changed"),
        files={"run/checkpoints/step-00000007/manifest.json": "{"},
    ),
    "checkpoints a file": train(code=5, says=("run folder run", "File exists"), files={"run/checkpoints": ""}),
    "tensorboard missing": train(
        "record.tensorboard=true",
        says=("record.tensorboard = true", "pip install 'meshwright[tensorboard]'"),
        before=NO_TENSORBOARD,
    ),
    "ls of nothing": Wrong(("checkpoint", "ls", "nowhere"), 5, ("nowhere: is no folder",)),
    "ls of a file": Wrong(("checkpoint", "ls", "r.toml"), 5, ("r.toml: is no folder",)),
    "show of no run": Wrong(("checkpoint", "show", "."), 5, ("holds no checkpoint", "step-00000020")),
    "verify of no run": Wrong(("checkpoint", "verify", "."), 5, ("holds no checkpoint",)),
    "digest of no run": Wrong(("checkpoint", "digest", "."), 5, ("holds no checkpoint",)),
    "show of an empty checkpoint": Wrong(
        ("checkpoint", "show", "c/step-00000001"), 5, ("has no manifest.json",), {"c/step-00000001/notes": ""}
    ),
    "export of no run": Wrong(("checkpoint", "export", ".", "--output", "o"), 5, ("holds no checkpoint",)),
}

RUNS = {
    "sample raises": train(
        "data.build=mine:broken", code=4, runs=True, says=("sample 7 of the data set Broken", "disk on fire")
    ),
    "sample raises in a worker": train(
        "data.build=mine:broken",
        "data.workers=1",
        code=4,
        runs=True,
        says=("sample 7 of the data set Broken", "disk on fire"),
    ),
    "samples of many shapes": train(
        "data.build=mine:ragged", code=4, runs=True, says=("2 items of the data set: do not make a batch",)
    ),
    "loss detached": train("loss.build=mine:detached", runs=True, says=("the loss function", "does not depend on")),
    "loss a string": train(
        "loss.build=mine:a_string", runs=True, says=("the loss function: returned a str", "(sum, count)")
    ),
    "loss a vector": train(
        "loss.build=mine:a_vector", runs=True, says=("the loss function: returned a tuple of Tensor",)
    ),
    "no loss": train("loss={}", runs=True, says=("token cross-entropy", "gives a Tensor", "loss.build")),
    "loss fails": train(
        "loss.build=mine:fails", code=4, runs=True, says=("IndexError", "step 1", "mine.py:", "in fails")
    ),
    "loss of one argument": train("loss.build=mine:one_argument", code=4, runs=True, says=("one_argument() takes 1",)),
    "loss NaN": train(
        "loss.build=mine:not_a_number", code=4, runs=True, says=("step 1", "rank 0, microbatch 0", "not finite")
    ),
    "data NaN": train(
        "data.build=mine:poisoned", "--nproc", "2", code=4, runs=True, says=("step ", "rank ", "microbatch ")
    ),
    "rank leaves": train(
        "loss.build=mine:leaves", "--nproc", "2", code=4, runs=True, says=("rank 1 ended by sys.exit(3)", "step 1")
    ),
    "rank vanishes": train(
        "loss.build=mine:vanishes",
        "--nproc",
        "2",
        code=4,
        runs=True,
        says=("rank 1 ended with exit code 0", "os._exit"),
    ),
    "two ranks, one mistake": train(
        "loss.build=mine:a_string", "--nproc", "2", runs=True, says=("error: the loss function",)
    ),
    "token outside": train(
        "model.vocab_size=100",
        code=4,
        runs=True,
        says=("token id 257 in row ", "vocabulary of 100", "model.vocab_size"),
        files={"r.toml": LLAMA % 'source = "tokens"\npath = "ids.bin"', "ids.bin": b"\1\1" * 200},
    ),
}

TABLE = {
    f"{kind}: {name}": case
    for kind, cases in {
        "command line": COMMAND_LINE,
        "recipe": RECIPES,
        "layout": LAYOUTS,
        "environment": ENVIRONMENTS,
        "model": MODELS,
        "data": DATA,
        "folder": FOLDERS,
    }.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", TABLE)
def test_a_mistake_is_named_and_nothing_on_disk_is_touched(meshwright, tmp_path, name) -> None:
    case = TABLE[name]
    lay_out(tmp_path, case.files)
    before = tree_hash(tmp_path)
    result = meshwright(*case.words, cwd=tmp_path, env=case.env, before=case.before)
    check(case, result)
    assert tree_hash(tmp_path) == before


@pytest.mark.parametrize("name", RUNS)
def test_a_mistake_that_only_running_shows_ends_the_run_with_its_name(meshwright, tmp_path, name) -> None:
    case = RUNS[name]
    lay_out(tmp_path, case.files)
    check(case, meshwright(*case.words, cwd=tmp_path, env=case.env, before=case.before))
    assert not (tmp_path / "run/summary.json").exists()


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) + len(RUNS) >= 90
    assert {case.code for case in [*TABLE.values(), *RUNS.values()]} == {2, 4, 5}


def test_a_changed_recipe_is_refused_on_resume_and_what_is_there_stays(meshwright, tmp_path) -> None:
    lay_out(tmp_path, {})
    first: Any = meshwright("train", "r.toml", "--run-dir", "run", cwd=tmp_path)
    assert (first.code, first.err) == (0, "")
    before = tree_hash(tmp_path)
    for words, says in (
        (("--resume", "optimizer.lr=0.2"), ("optimizer.lr was 0.1, now 0.2", "may change")),
        (("--resume", "--nproc", "2", "train.seed=1"), ("train.seed was 0, now 1",)),
        ((), ("holds a run already (1 checkpoints)", "--resume")),
    ):
        case = train(*words, says=says)
        check(case, meshwright(*case.words, cwd=tmp_path))
        assert tree_hash(tmp_path) == before


def test_an_export_onto_something_is_refused(meshwright, tmp_path) -> None:
    save_tiny(tmp_path / "checkpoints", 3, recipe=TINY_RECIPE)
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    before = tree_hash(tmp_path)
    for output, code, says in (
        ("there", 2, "exists already"),
        ("link", 2, "exists already"),
        (".", 2, "exists already"),
        ("there/below", 5, "could not be written"),
    ):
        result = meshwright("checkpoint", "export", ".", "--output", output, cwd=tmp_path)
        check(Wrong((), code, (f"--output {output}", says)), result)
        assert tree_hash(tmp_path) == before
