"""`[model] hf = PATH` on real ranks: equal under every layout, read by slices, resumed on another layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import numpy
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Gemma2ForCausalLM,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
)

from meshwright.errors import CheckpointError, DataError
from meshwright.models import weights
from meshwright.models.anatomy import parameters_in_order, tied_groups
from meshwright.models.built import Index
from meshwright.parallel.leaves import local, rows_here
from meshwright.spec.load import from_table
from meshwright.train.state import digest_of
from meshwright.train.trainer import Trainer
from models.tiny_hf import drawn, loaded, write_config, write_model
from train.parity import joined_ids, largest_distances, recipe_table, train
from train.runs import changed, gathered, loaded_in, run_in, steps_in

WARM = (Gemma2ForCausalLM, GPT2LMHeadModel, GPTNeoXForCausalLM, LlamaForCausalLM, Qwen2ForCausalLM)
"""Imported here, so that ranks are forked with them."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp2": (2, {"dp_replicate": 2}),
    "zero1x2": (2, {"dp_shard": 2, "zero_stage": 1}),
    "zero2x2": (2, {"dp_shard": 2, "zero_stage": 2}),
    "zero3x2": (2, {"dp_shard": 2, "zero_stage": 3}),
    "zero3x3": (3, {"dp_shard": 3, "zero_stage": 3}),
    "hsdp2x2": (4, {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3}),
}
BOUND = 1e-11
"""fp64 sums in another order differ by 1e-16 of themselves; a few steps let that grow."""


def table_of(folder: Path, layout: str, steps: int = 4, **changes: Mapping[str, Any]) -> dict[str, Any]:
    table = recipe_table("gpt2", "fp64", "adamw", steps=steps) | {"model": {"hf": str(folder)}}
    table["schedule"] = {"name": "cosine", "warmup_steps": 1}
    table["optimizer"] = table["optimizer"] | {"groups": [{"pattern": "*norm*", "weight_decay": 0.0}]}
    if "gpt2" in folder.name:
        table["optimizer"]["groups"] = [{"pattern": "*.ln_*", "weight_decay": 0.0}]
    if layout == "hsdp2x2":  # 12 samples on 4 ranks are no microbatches of 2
        table["batch"] = {"global_batch_size": 12, "microbatch_size": 3}
    return changed(table, layout=LAYOUTS[layout][1], **changes)


def opened(world: Any, table: dict[str, Any]) -> tuple[dict[str, torch.Tensor], str, list[list[str]], list[str]]:
    """Weights at the start, their digest, ties, and what the user is told."""
    trainer = Trainer(from_table(table), world)
    pieces = trainer.state.weights()
    said = [*trainer.lines(), *trainer.warnings()]
    return gathered(pieces), digest_of(pieces, world.speaks), tied_groups(trainer.model), said


def test_a_config_alone_starts_from_one_set_of_weights_under_every_layout(run_ranks, tmp_path) -> None:
    folder = write_config(tmp_path / "gpt2", "gpt2")
    digests = set()
    for layout in ("ddp2", "zero3x3"):
        ranks = run_ranks(LAYOUTS[layout][0], opened, table_of(folder, layout))
        digests.add(ranks[0][1])
        for tensors, _, ties, _ in ranks:
            assert ties == [["lm_head.weight", "transformer.wte.weight"]]
            assert all(torch.equal(tensors[name], tensor) for name, tensor in ranks[0][0].items())
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("layout", "name"),
    [(at, "qwen2") for at in ("zero1x2", "zero2x2", "zero3x3", "hsdp2x2")] + [("zero3x2", "llama")],
)
def test_files_give_each_layout_what_transformers_reads_bit_by_bit(run_ranks, tmp_path, name, layout) -> None:
    folder = write_model(tmp_path / name, name, "20KB", torch.bfloat16)
    wanted = loaded(folder)
    table = table_of(folder, layout, precision={"compute": "fp32"})
    for tensors, _, ties, said in run_ranks(LAYOUTS[layout][0], opened, table):
        assert ties == ([] if name == "llama" else [["lm_head.weight", "model.embed_tokens.weight"]])
        assert tensors.keys() == {n for n in wanted if ties == [] or n != "model.embed_tokens.weight"}
        assert all(torch.equal(tensor, wanted[n]) for n, tensor in tensors.items())
        assert sum(line.startswith("weights: ") for line in said) == 1


class Written(TorchDispatchMode):
    """Shapes of the real tensors that some operator wrote, and which; views of a file that is mapped cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[tuple[int, ...], str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.empty.memory_format:  # which write nothing
            tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and not isinstance(t, DTensor)]
            self.shapes |= {tuple(t.shape): str(func) for t in tensors if not t.is_meta}
        return result


@contextlib.contextmanager
def noted(read: dict[str, int]) -> Iterator[None]:
    """Note how many numbers of each tensor are read from files."""
    part = weights._part

    def noting(piece: weights.Held, index: Index) -> torch.Tensor:
        tensor = part(piece, index)
        read[piece.name] = read.get(piece.name, 0) + tensor.numel()
        return tensor

    weights._part = noting
    try:
        yield
    finally:
        weights._part = part


def watched(world: Any, table: dict[str, Any]) -> tuple[dict[str, int], dict[str, int], dict[tuple[int, ...], str]]:
    """What this rank read, what it has, and the shapes of all that was written while the trainer was made."""
    read: dict[str, int] = {}
    with noted(read), Written() as written:
        trainer = Trainer(from_table(table), world)
    has = {name: local(parameter).numel() for name, parameter in parameters_in_order(trainer.model)}
    assert all(isinstance(leaf.leaf, torch.nn.Parameter) and not leaf.leaf.is_meta for leaf in trainer.state.leaves)
    assert all(local(p).shape[0] == len(range(*rows_here(p).indices(p.shape[0]))) for p in trainer.model.parameters())
    return read, has, written.shapes


@pytest.mark.parametrize(("layout", "reduction"), [("zero1x2", "fast"), ("zero3x3", "exact"), ("hsdp2x2", "fast")])
def test_no_rank_reads_or_holds_more_than_its_rows(run_ranks, tmp_path, layout, reduction) -> None:
    folder = write_model(tmp_path / "llama", "llama", "20KB")
    sizes = {name: tensor.numel() for name, tensor in loaded(folder).items()}
    n, spec = LAYOUTS[layout]
    whole = {tuple(tensor.shape) for tensor in loaded(folder).values() if tensor.ndim > 1}
    matrices = whole - {(-(-rows // spec["dp_shard"]), columns) for rows, columns in whole}  # some share may look so
    assert len(matrices) >= 5
    ranks = run_ranks(n, watched, table_of(folder, layout, train={"reduction": reduction}))
    for read, has, shapes in ranks:
        assert read == {name: number for name, number in has.items() if number}
        assert {shape: shapes[shape] for shape in matrices & shapes.keys()} == {}
    replicas = n // spec["dp_shard"]
    total = {name: sum(read.get(name, 0) for read, _, _ in ranks) for name in sizes}
    assert total == {name: replicas * size for name, size in sizes.items()}
    for name, size in sizes.items():  # the first rank's share is the largest: whole rows
        assert max(read.get(name, 0) for read, _, _ in ranks) < size, name


@pytest.mark.parametrize("name", ["gpt2", "llama tied"])
def test_a_tied_model_trains_cut_as_one_process_trains_it(run_ranks, tmp_path, name) -> None:
    """The tied weight's gradient is the sum of both uses; gpt2 drops out in and outside of its blocks."""
    folder = write_model(tmp_path / name, name, "20KB")
    (single,) = run_ranks(1, train, table_of(folder, "single", steps=4))
    assert "lm_head.weight" in single.gradients[0] and not [n for n in single.weights if "wte" in n or "embed" in n]
    for record in (ranks := run_ranks(2, train, table_of(folder, "zero3x2", steps=4))):
        far = largest_distances(record, single)
        assert all(x <= BOUND for x in far.values()), far
    assert joined_ids(ranks) == single.ids


def test_exact_mode_gives_one_digest_on_every_layout(run_ranks, tmp_path) -> None:
    folder = write_model(tmp_path / "qwen2", "qwen2", "20KB")
    digests = {}
    for layout in ("single", "ddp2", "zero2x2"):
        table = table_of(folder, layout, 2, train={"reduction": "exact"}, precision={"compute": "fp32"})
        digests[layout] = run_ranks(LAYOUTS[layout][0], run_in, table, str(tmp_path / layout))[0].summary[
            "weights_sha256"
        ]
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("changes", [{"precision": {"compute": "bf16"}}, {"train": {"recompute": "full"}}])
def test_bf16_and_recompute_take_its_layers(run_ranks, tmp_path, changes) -> None:
    folder = write_model(tmp_path / "llama", "llama")
    (single,) = run_ranks(1, train, table_of(folder, "single", 2, **changes))
    two = run_ranks(2, train, table_of(folder, "zero3x2", 2, **changes))
    far = largest_distances(two[1], single)
    # bf16 has 3 digits; the weights move by at most the rate in each of 2 steps, and those here are below 0.2.
    assert far["loss"] < (1e-2 if "precision" in changes else BOUND), far
    assert far["weight"] < (0.1 if "precision" in changes else BOUND), far


def test_a_run_goes_on_on_another_layout(run_ranks, tmp_path) -> None:
    folder, run = write_model(tmp_path / "gpt2", "gpt2", "20KB"), str(tmp_path / "run")
    exact: dict[str, Any] = {"train": {"reduction": "exact"}, "precision": {"compute": "fp32"}}
    (whole,) = run_ranks(1, run_in, table_of(folder, "single", **exact), str(tmp_path / "whole"))
    first = changed(table_of(folder, "zero3x3", **exact), train={"stop_after": 2})
    told = run_ranks(3, run_in, first, run)[0]
    assert "weights: 28 tensors" in told.out + told.err and steps_in(Path(run)) == [2]
    (held, _) = run_ranks(2, loaded_in, table_of(folder, "zero1x2", **exact), run)[1]
    assert "lm_head.weight" in held and "transformer.wte.weight" not in held
    last = run_ranks(2, run_in, table_of(folder, "zero1x2", **exact), run, True)[0]
    assert last.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_a_model_that_transformers_translates_is_read_whole_and_said(run_ranks, tmp_path) -> None:
    folder = write_model(tmp_path / "gpt_neox", "gpt_neox")
    wanted = loaded(folder)
    for tensors, _, _, said in run_ranks(2, opened, table_of(folder, "zero3x2", precision={"compute": "fp32"})):
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors.items())
        assert [line for line in said if "every rank reads all of it" in line]


def test_a_fresh_head_is_the_same_under_every_layout(run_ranks, tmp_path) -> None:
    folder = write_config(tmp_path / "llama", "llama")
    drawn(folder).base_model.save_pretrained(folder)
    found = [run_ranks(LAYOUTS[at][0], opened, table_of(folder, at))[0] for at in ("single", "zero3x3")]
    assert len({digest for _, digest, _, _ in found}) == 1
    assert all([line for line in said if "the head starts from fresh ones" in line] for _, _, _, said in found)


def test_torn_files_end_the_run_with_a_line(run_ranks, tmp_path) -> None:
    folder = write_model(tmp_path / "llama", "llama")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="cannot be read"):
        run_ranks(2, opened, table_of(folder, "zero3x2"))


def test_gemma_trains_a_step_cut_in_three(run_ranks, tmp_path) -> None:
    """It scales its embedding by a buffer, and caps its logits."""
    folder = write_model(tmp_path / "gemma2", "gemma2")
    ranks = run_ranks(3, train, table_of(folder, "zero3x3", steps=1))
    (single,) = run_ranks(1, train, table_of(folder, "single", steps=1))
    far = largest_distances(ranks[2], single)
    assert all(x <= BOUND for x in far.values()), far


def test_ids_in_a_file_are_checked_against_the_models_vocabulary(run_ranks, tmp_path) -> None:
    folder = write_config(tmp_path / "llama", "llama")
    numpy.arange(150, dtype=numpy.uint16).tofile(tmp_path / "ids.bin")
    table = table_of(folder, "single", 1) | {"data": {"source": "tokens", "path": str(tmp_path / "ids.bin")}}
    table["data"] |= {"seq_len": 10}
    with pytest.raises(DataError, match="is outside the vocabulary of 131"):
        run_ranks(1, train, changed(table, train={"steps": 1}))
