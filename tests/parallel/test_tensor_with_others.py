"""Tensor parallelism inside data parallelism, ZeRO, half precision; its collectives; models of one's own."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.models.build import build_reference
from meshwright.parallel.mixed import Copies, cast_around
from meshwright.parallel.recompute import apply_recompute
from meshwright.parallel.seeding import MicrobatchSeeds
from meshwright.parallel.tensor import cut_tensors, head_part
from meshwright.spec.tensor_rules import rules_of
from meshwright.train.loss import cross_entropy_of, token_cross_entropy
from parallel.tensor_runs import (
    Distance,
    add_copies,
    axis_of,
    batch_at,
    named_once,
    reference_beside,
    rules_for,
    shape_of,
    train_beside,
)

EXACT = 1e-11
"""Of the model-wide maximum, in fp64."""
IN_BF16 = 20 * 2**-9
"""bf16 has 8 bits: an activation is off by 2**-9, and a gradient has passed through about 20 of them."""


def whole_and_local(world, name, tp, dtype=torch.float64, **keys):
    """A reference model whole, and cut over tp ranks."""
    shape = shape_of(name, **{"tied": name == "gpt2"} | keys)
    axis, rules = axis_of(world, tp), rules_for(shape)
    whole, local = build_reference(shape, 0, dtype), build_reference(shape, 0, dtype)
    cuts = cut_tensors(local, rules, axis, loss_parallel=True)
    return whole, local, cuts, axis, head_part(rules, cuts, axis)


def gradients_apart(whole, local, cuts, axis):
    distance = Distance()
    masters = named_once(whole)
    for name, parameter in named_once(local).items():
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        distance.see("gradients", add_copies(gradient, cuts[name], axis), masters[name].grad[cuts[name].index])
    return distance.relative()["gradients"]


def under_data_parallelism(world, name, kind):
    """2 x tp2: each data-parallel rank has two rows of four; sums of sums over the global count."""
    whole, local, cuts, axis, part = whole_and_local(world, name, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    batch, place = batch_at(0, rows=4), mesh.get_local_rank()
    total, count = token_cross_entropy(whole, batch)
    (total / count).backward()
    for model in (whole, local):
        apply_recompute(model, "full")
    if kind == "ddp":
        entry = DistributedDataParallel(local, process_group=mesh.get_group())
    else:
        for block in local.blocks:
            fully_shard(block, mesh=mesh)
        entry = fully_shard(local, mesh=mesh)
    mine = {key: rows[2 * place : 2 * place + 2] for key, rows in batch.items()}
    total, _ = cross_entropy_of(entry(mine["tokens"]), mine["labels"], part=part)
    (2 * total / count).backward()  # both kinds take the mean over their ranks
    return gradients_apart(whole, local, cuts, axis)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "zero"),
        ("gpt2", "ddp"),
        pytest.param("gpt2", "zero", marks=pytest.mark.matrix),
        pytest.param("llama", "ddp", marks=pytest.mark.matrix),
    ],
)
def test_tp2_in_two_data_parallel_ranks_equals_one_process(run_ranks, name, kind) -> None:
    assert max(run_ranks(4, under_data_parallelism, name, kind)) < EXACT


def under_zero_in_bf16(world, name):
    """2 x tp2 with ZeRO's own casts: fp32 masters, bf16 in forward and backward, gradients reduced in fp32."""
    whole, local, cuts, axis, part = whole_and_local(world, name, 2, torch.float32)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    batch, place = batch_at(0, rows=4), mesh.get_local_rank()
    total, count = token_cross_entropy(whole, batch)
    (total / count).backward()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*local.blocks, local):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    cast_around(local, list(local.blocks), torch.bfloat16, lambda: True)
    mine = {key: rows[2 * place : 2 * place + 2] for key, rows in batch.items()}
    total, _ = token_cross_entropy(local, mine, part=part)
    (2 * total / count).backward()
    return gradients_apart(whole, local, cuts, axis)


def in_fp32(world, name):
    return reference_beside(world, name, dropout=0.1, dtype=torch.float32, steps=1)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.matrix)])
def test_in_fp32_they_differ_by_rounding_alone(run_ranks, name) -> None:
    for apart in run_ranks(2, in_fp32, name):
        # A gradient is a chain of some 20 sums of about 100 terms: 20 * sqrt(100) * 2**-24 = 1.2e-5 of the largest.
        assert apart["loss"] < 1e-6 and apart["gradients"] < 1.2e-5, apart
        # AdamW divides by the gradient's own size: one that is all rounding moves its weight by lr = 1e-3, either way.
        assert apart["weights"] < 2e-3, apart


def in_bf16(world, name):
    whole, local, cuts, axis, part = whole_and_local(world, name, 2, torch.float32, dropout=0.1)
    for model, its_part in ((whole, None), (local, part)):
        copies, seeds = Copies(model, torch.bfloat16), MicrobatchSeeds(0)
        seeds.attach(model)
        cast_around(model, list(model.blocks), torch.bfloat16, lambda copies=copies: copies.active)
        apply_recompute(model, "selective")
        copies.put()
        seeds.at(0, 0)
        total, count = token_cross_entropy(model, batch_at(0), part=its_part)
        (total / count).backward()
        copies.take_away()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    return gradients_apart(whole, local, cuts, axis)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.matrix)])
def test_copies_in_bf16_serve_a_cut_model_too(run_ranks, name) -> None:
    assert max(run_ranks(2, in_bf16, name)) < IN_BF16


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.matrix)])
def test_zero_casts_the_parts_of_a_cut_model(run_ranks, name) -> None:
    assert max(run_ranks(4, under_zero_in_bf16, name)) < IN_BF16


class Collectives(TorchDispatchMode):
    """Counts them by kind."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if func.namespace == "_c10d_functional" and name.startswith(("all_", "reduce_")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(world, name, n_kv_heads):
    _, local, *_, part = whole_and_local(world, name, 2, n_kv_heads=n_kv_heads)
    with Collectives() as forward:
        total, _ = token_cross_entropy(local, batch_at(0), part=part)
    with Collectives() as backward:
        total.backward()
    return dict(forward.counts), dict(backward.counts)


@pytest.mark.parametrize(("name", "n_kv_heads"), [("llama", 2), ("llama", 1), ("gpt2", 8)])
def test_a_branch_has_one_all_gather_and_one_reduce_scatter_each_way(run_ranks, name, n_kv_heads) -> None:
    branches = 2 * 2
    both = {"all_gather_into_tensor": branches + 1, "reduce_scatter_tensor": branches + 1}  # + head and embedding
    for forward, backward in run_ranks(2, count_collectives, name, n_kv_heads):
        assert forward == both | {"all_reduce": 2}  # the loss: the greatest logit, then the sums
        assert backward == both


class Branch(nn.Module):
    """A feed-forward layer with a scale for each feature and a dropout among them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(20)
        self.up, self.down = nn.Linear(20, 37), nn.Linear(37, 20)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 37))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x))) * self.scale))


class Own(nn.Module):
    """tokens (b, s) -> logits (b, s, 11)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 20, padding_idx=7)
        self.layers = nn.ModuleList(Branch() for _ in range(2))
        self.classes = nn.Linear(20, 11)

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.classes(x)


PLAIN = {
    "words": "vocabulary",
    "layers.*.norm": "replicated",
    "layers.*.up": "column",
    "layers.*.scale": "column",
    "layers.*.dropout": "feature-dropout",
    "layers.*.down": "row",
    "classes": "head",
}
JOINED = {"layers.*.up": "column-gather", "layers.*.down": "row-split", "classes": "column-gather"}


def own_beside(world, table):
    axis, rules = axis_of(world, world.world_size), rules_of(table)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Own().double())
    whole, local = models
    cuts = cut_tensors(local, rules, axis, loss_parallel=True)
    with pytest.MonkeyPatch.context() as patch:
        small = partial(batch_at, vocab=11)
        patch.setattr("parallel.tensor_runs.batch_at", small)
        return train_beside(whole, local, cuts, axis, head_part(rules, cuts, axis))


@pytest.mark.parametrize(
    "tp", [2, pytest.param(4, marks=pytest.mark.matrix), pytest.param(5, marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize("table", [PLAIN, JOINED], ids=["plain", "joined"])
def test_a_module_of_ones_own_is_cut_by_its_table(run_ranks, table, tp) -> None:
    for apart in run_ranks(tp, own_beside, table):
        assert max(apart.values()) < EXACT, apart


def evaluated(world, name):
    """Whole logits without a gradient, in evaluation mode: of a model with dropout."""
    shape = shape_of(name, tied=True, dropout=0.5)
    axis = axis_of(world, 2)
    whole, local = build_reference(shape, 0, torch.float64).eval(), build_reference(shape, 0, torch.float64).eval()
    cut_tensors(local, rules_for(shape), axis, loss_parallel=False)
    with torch.no_grad():
        tokens = batch_at(0)["tokens"]
        return (whole(tokens) - local(tokens)).abs().max().item()


def test_whole_logits_come_out_where_the_loss_is_not_ours(run_ranks) -> None:
    assert max(run_ranks(2, evaluated, "gpt2")) < 1e-14


def wrong_ids(world, what):
    """An id beyond the vocabulary, as a token and as a label."""
    _, local, *_, part = whole_and_local(world, "llama", 2)
    batch = batch_at(0)
    batch[what][0, 0] = 131
    try:
        token_cross_entropy(local, batch, part=part)
    except (IndexError, RuntimeError) as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("what", ["tokens", "labels"])
def test_an_id_beyond_the_vocabulary_fails_on_every_rank(run_ranks, what) -> None:
    assert all(run_ranks(2, wrong_ids, what))
