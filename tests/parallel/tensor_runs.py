"""A model over tp ranks beside the same model whole: how far losses, gradients and weights are apart."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.models.build import build_reference
from meshwright.parallel.cuts import Cut
from meshwright.parallel.recompute import apply_recompute
from meshwright.parallel.seeding import MicrobatchSeeds
from meshwright.parallel.tensor import cut_tensors, head_part
from meshwright.parallel.tensor_moves import TensorAxis
from meshwright.spec.sections import ModelSection
from meshwright.spec.shape import DecoderShape, resolve_shape
from meshwright.spec.tensor_rules import TensorRules, reference_rules
from meshwright.train.loss import token_cross_entropy

VOCAB, SEQ_LEN, ROWS = 131, 12, 3


def shape_of(name: str, *, tied: bool, dropout: float = 0.0, n_kv_heads: int = 2) -> DecoderShape:
    """8 heads; 131 tokens and 101 features, which nothing divides."""
    keys: dict[str, Any] = {"n_kv_heads": n_kv_heads} if name == "llama" else {}
    section = ModelSection(
        name=name, n_layers=2, d_model=48, n_heads=8, d_ff=101, dropout=dropout, tied_embeddings=tied, **keys
    )
    return resolve_shape(section, SEQ_LEN, VOCAB)


def rules_for(shape: DecoderShape) -> TensorRules:
    return reference_rules(shape.name, shape.n_heads, shape.n_kv_heads)


def axis_of(world: Any, size: int) -> TensorAxis:
    """Neighbouring ranks, as tp is innermost; with as many groups as the world has."""
    mesh = init_device_mesh("cpu", (world.world_size // size, size), mesh_dim_names=("dp", "tp"))["tp"]
    return TensorAxis(mesh.get_local_rank(), size, mesh)


def batch_at(step: int, rows: int = ROWS, vocab: int = VOCAB, seq_len: int = SEQ_LEN) -> dict[str, torch.Tensor]:
    """Ragged: of each row some labels at the end count for nothing, of one all."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, vocab, (rows, seq_len), generator=generator)
    labels = torch.randint(0, vocab, (rows, seq_len), generator=generator)
    for row in range(rows):
        labels[row, seq_len - 5 * row :] = -100
    return {"tokens": tokens, "labels": labels}


def add_copies(gradient: torch.Tensor, cut: Cut, axis: TensorAxis) -> torch.Tensor:
    """What the step does to a partial gradient: its sum over the copies."""
    if not cut.partial:
        return gradient
    every = [torch.empty_like(gradient) for _ in range(axis.size)]
    dist.all_gather(every, gradient.contiguous(), group=axis.mesh.get_group())
    first = axis.rank // cut.copies * cut.copies
    return torch.stack(every[first : first + cut.copies]).sum(0)


def named_once(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


class Distance:
    """Largest differences so far, and the largest values of the whole model."""

    def __init__(self) -> None:
        self.apart: dict[str, float] = {}
        self.largest: dict[str, float] = {}

    def see(self, what: str, mine: torch.Tensor, whole: torch.Tensor) -> None:
        assert mine.shape == whole.shape, (what, mine.shape, whole.shape)
        gap = (mine - whole).abs().max().item() if mine.numel() else 0.0
        self.apart[what] = max(self.apart.get(what, 0.0), gap)
        self.largest[what] = max(self.largest.get(what, 0.0), whole.abs().max().item() if whole.numel() else 0.0)

    def relative(self) -> dict[str, float]:
        return {what: gap / (self.largest[what] or 1.0) for what, gap in self.apart.items()}


def train_beside(
    whole: nn.Module, local: nn.Module, cuts: dict[str, Cut], axis: TensorAxis, part: Any, *, steps: int = 3
) -> dict[str, float]:
    """Some AdamW steps of both: the relative distance of losses, gradients (before each step) and weights (after)."""
    distance, masters = Distance(), named_once(whole)
    models = [(whole, None), (local, part)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model, _ in models]
    seeds = [MicrobatchSeeds(0), MicrobatchSeeds(0)]
    for seed, (model, _) in zip(seeds, models, strict=True):
        seed.attach(model)
    for step in range(steps):
        losses = []
        for seed, optimizer, (model, its_part) in zip(seeds, optimizers, models, strict=True):
            optimizer.zero_grad()
            seed.at(step, 0)
            total, count = token_cross_entropy(model, batch_at(step), part=its_part)
            (total / count).backward()
            losses.append(total.detach())
        distance.see("loss", losses[1], losses[0])
        for name, parameter in named_once(local).items():
            parameter.grad = add_copies(parameter.grad, cuts[name], axis)
            distance.see("gradients", parameter.grad, masters[name].grad[cuts[name].index])
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in named_once(local).items():
            distance.see("weights", parameter.detach(), masters[name].detach()[cuts[name].index])
    require_equal_copies(local, cuts, axis)
    return distance.relative()


def require_equal_copies(local: nn.Module, cuts: dict[str, Cut], axis: TensorAxis) -> None:
    """What several ranks have is equal on them to the last bit, whatever was summed in which order."""
    for name, parameter in named_once(local).items():
        if cuts[name].copies > 1:
            every = [torch.empty_like(parameter.detach()) for _ in range(axis.size)]
            dist.all_gather(every, parameter.detach().contiguous(), group=axis.mesh.get_group())
            first = axis.rank // cuts[name].copies * cuts[name].copies
            assert all(torch.equal(every[first], other) for other in every[first : first + cuts[name].copies]), name


def reference_beside(
    world: Any,
    name: str,
    *,
    tied: bool = False,
    dropout: float = 0.0,
    recompute: str = "none",
    dtype: torch.dtype = torch.float64,
    loss_parallel: bool = True,
    n_kv_heads: int = 2,
    steps: int = 3,
) -> dict[str, float]:
    """A reference model cut over all ranks, beside the whole."""
    shape = shape_of(name, tied=tied, dropout=dropout, n_kv_heads=n_kv_heads)
    axis, rules = axis_of(world, world.world_size), rules_for(shape)
    whole, local = build_reference(shape, 0, dtype), build_reference(shape, 0, dtype)
    cuts = cut_tensors(local, rules, axis, loss_parallel=loss_parallel)
    for model in (whole, local):
        apply_recompute(model, recompute)
    part = head_part(rules, cuts, axis) if loss_parallel else None
    return train_beside(whole, local, cuts, axis, part, steps=steps)
