"""A table of layouts that do not work: each is refused before a process starts, with its rule and the nearest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cli.warm import Result
from cli.wrong import Wrong, check, lay_out, train

LLAMA = """
[model]
name = "llama"
n_layers = 4
d_model = 96
n_heads = 12
n_kv_heads = 4
[data]
seq_len = 24
[batch]
global_batch_size = 24
microbatch_size = 4
[optimizer]
lr = 0.1
[train]
steps = 3
"""

OWN = LLAMA.replace('name = "llama"\nn_layers = 4\nd_model = 96\nn_heads = 12\nn_kv_heads = 4', 'build = "mine:model"')
ZBV = ("layout.pp=2", "layout.pp_schedule=zbv")
LOOPED = ("layout.pp=2", "layout.pp_schedule=interleaved1f1b")
LOOPED_ZERO_BUBBLE = ("layout.pp=2", "layout.pp_schedule=interleaved-zero-bubble")


def refused(*words: str, says: tuple[str, ...], recipe: str = LLAMA) -> Wrong:
    return train(*words, says=says, files={"r.toml": recipe})


TENSOR = {
    "heads": refused("layout.tp=5", says=("layout.tp: is 5", "has 12 heads", "Legal: 1, 2 or 4", "nearest: 4")),
    "more than heads": refused("layout.tp=24", says=("layout.tp: is 24", "has 12 heads", "nearest: 12")),
    "kv heads, shared": refused("layout.tp=6", says=("layout.tp: is 6", "has 4 heads: 4 does not divide 6", "4 or 12")),
    "kv heads, divided": refused("layout.tp=3", says=("layout.tp: is 3", "3 does not divide 4", "2 or 4")),
    "sequence": refused(
        "layout.tp=4", "data.seq_len=22", says=("data.seq_len: is 22", "22 % 4 = 2", "Nearest: 20 or 24")
    ),
    "adafactor": refused(
        "layout.tp=2",
        "optimizer.name=adafactor",
        says=("optimizer.name: ", '"adafactor" with layout.tp 2', "elementwise", 'Nearest: "adamw", or layout.tp = 1'),
    ),
    "muon": refused(
        "layout.tp=2",
        "optimizer.name=muon",
        'layout.tensor={"up" = "column"}',
        recipe=OWN,
        says=("optimizer.name: ", '"muon" with layout.tp 2', 'Nearest: "adamw"'),
    ),
    "own optimizer": refused(
        "layout.tp=2",
        "optimizer.build=mine:picky",
        says=("optimizer.build: ", "layout.tp 2", "part of every matrix"),
    ),
    "own heads": refused(
        "layout.tp=4",
        'layout.tensor={"up" = "row:6"}',
        recipe=OWN,
        says=("layout.tp: is 4", "up has 6 heads: 4 does not divide 6", "nearest: 3 or 6"),
    ),
    "no such style": refused(
        "layout.tp=2", 'layout.tensor={"up" = "colum"}', recipe=OWN, says=("layout.tensor", 'Nearest: "column"')
    ),
    "two things at once": refused(
        "layout.tp=5", "optimizer.name=adafactor", says=("layout.tp: is 5", "optimizer.name: ")
    ),
}

STAGES = {
    "stages": refused("layout.pp=6", says=("layout.pp: pp 6 = 6 stages", "has 4 layers", "Nearest: pp 4")),
    "chunks": refused(
        *LOOPED,
        "layout.pp_chunks=3",
        says=("layout.pp: pp 2 x 3 chunks = 6 stages", "has 4 layers", "pp_schedule 1f1b", "model.n_layers 6"),
    ),
    "zbv": refused("layout.pp=3", "layout.pp_schedule=zbv", says=("pp 3 x 2 chunks = 6 stages", "Nearest: pp 2")),
    "zbv of 3 chunks": refused(*ZBV, "layout.pp_chunks=3", says=("layout.pp_chunks: is 3", "zbv", "Nearest: 2")),
    "1f1b of 2 chunks": refused(
        "layout.pp=2", "layout.pp_chunks=2", says=("layout.pp_chunks: is 2", "1f1b, which has 1 chunk", "zbv")
    ),
    "1 chunk": refused(*LOOPED, "layout.pp_chunks=1", says=("layout.pp_chunks", "is 1", "at least 2")),
    "no such schedule": refused(
        "layout.pp=2", "layout.pp_schedule=1fb1", says=("layout.pp_schedule", "1fb1", 'Nearest: "1f1b"')
    ),
    "dual pipe": refused("layout.pp=2", "layout.pp_schedule=dualpipev", says=("layout.pp_schedule", "gpipe", "zbv")),
}

MICROBATCHES = {
    "1f1b, too few": refused(
        "layout.pp=4",
        "batch.microbatch_size=12",
        says=("1f1b, which needs at least pp 4 microbatches; a rank has 2", "batch.microbatch_size 6", "gpipe"),
    ),
    "1f1b, too few on each of 3": refused(
        "layout.pp=4", "layout.dp_replicate=3", says=("at least pp 4 microbatches; a rank has 2", "microbatch_size 2")
    ),
    "rounds": refused(
        *LOOPED,
        "batch.microbatch_size=8",
        says=(
            "interleaved1f1b, which needs rounds of pp 2 microbatches; a rank has 3",
            "microbatch_size 6 or 12",
            "2 or 4",
        ),
    ),
    "rounds of zero-bubble": refused(
        *LOOPED_ZERO_BUBBLE,
        "batch.microbatch_size=8",
        says=("interleaved-zero-bubble, which needs rounds of pp 2", "a rank has 3", "gpipe, which takes any number"),
    ),
    "rounds of an odd batch": refused(
        *LOOPED,
        "batch.global_batch_size=7",
        "batch.microbatch_size=1",
        says=("rounds of pp 2 microbatches; a rank has 7", "6 or 8 microbatches on each"),
    ),
    "batch over replicas": refused(
        "layout.pp=2", "layout.dp_replicate=5", says=("batch.global_batch_size", "24 / (5", "Nearest that work")
    ),
}

TOGETHER = {
    "zbv x zero3": refused(
        *ZBV, "layout.dp_shard=2", says=("layout.zero_stage 3", "wrong gradients", "Nearest: layout.zero_stage 2 or 1")
    ),
    "zero-bubble x hsdp": refused(
        *LOOPED_ZERO_BUBBLE,
        "layout.dp_shard=2",
        "layout.dp_replicate=3",
        "batch.microbatch_size=1",
        says=("is interleaved-zero-bubble with layout.zero_stage 3", "pp_schedule 1f1b"),
    ),
    "zbv x full recompute": refused(
        *ZBV, "train.recompute=full", says=("train.recompute: is full", "pp_schedule zbv", 'Nearest: "none"', "1f1b")
    ),
    "zero-bubble x selective recompute": refused(
        *LOOPED_ZERO_BUBBLE, "train.recompute=selective", says=("is selective with", "for each of its weights")
    ),
    "sync every": refused(
        "layout.pp=2", "train.sync=every", says=("train.sync: is every with layout.pp 2", 'Nearest: "last"')
    ),
    "units": refused("layout.pp=2", "layout.units=blocks.*", says=("layout.units: ", "layout.pp 2", "Leave it out")),
    "pp does not divide nproc": refused(
        "layout.pp=2", "--nproc", "3", says=("pp 2 = 2 does not divide 3 processes", "--nproc 2 or 4")
    ),
    "tp does not divide nproc": refused(
        "layout.tp=4", "--nproc", "6", says=("does not divide 6 processes", "--nproc 4 or 8", "tp = 3 or 6")
    ),
    "product": refused(
        "layout.pp=2",
        "layout.tp=2",
        "layout.dp_replicate=1",
        "--nproc",
        "8",
        says=("pp 2 x dp_replicate 1 x dp_shard 1 x tp 2 = 4, not 8 processes", "dp_replicate = 2"),
    ),
    "nothing to shard": refused(
        "layout.pp=2", "layout.zero_stage=3", says=("layout.zero_stage: is 3 with layout.dp_shard = 1", "dp_shard = 2")
    ),
    "stage 0 of shards": refused(
        "layout.tp=2", "layout.dp_shard=2", "layout.zero_stage=0", says=("layout.zero_stage: is 0", "dp_replicate = 2")
    ),
    "tp 0": refused("layout.tp=0", says=("layout.tp", "is 0", "at least 1")),
    "pp 2.5": refused("layout.pp=2.5", says=("layout.pp", "2.5", "whole number")),
    "a word as tp": refused("layout.tp=two", says=("layout.tp", '"two"', "whole number")),
    "unknown axis": refused("layout.pipeline=2", says=("layout.pipeline: [layout] has no such key", "tp, pp")),
    "stages, microbatches and heads": refused(
        "layout.pp=6",
        "layout.tp=5",
        "batch.microbatch_size=24",
        says=("layout.tp: is 5", "pp 6 = 6 stages", "needs at least pp 6 microbatches; a rank has 1"),
    ),
}

TABLES = (("tp", TENSOR), ("pp", STAGES), ("batch", MICROBATCHES), ("both", TOGETHER))
ALL = {f"{kind}, {name}": case for kind, table in TABLES for name, case in table.items()}


@pytest.mark.parametrize("name", ALL)
def test_an_illegal_layout_is_refused_before_a_process_starts(
    name: str, tmp_path: Path, meshwright: Callable[..., Result]
) -> None:
    case = ALL[name]
    lay_out(tmp_path, case.files)
    check(case, meshwright(*case.words, cwd=tmp_path))
    assert not (tmp_path / "run").exists()


def test_there_are_at_least_25_of_them() -> None:
    assert len(ALL) >= 25
