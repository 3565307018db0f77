"""Models that the tests of tracing share, with a loss and microbatches for each, and an independent count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.models.build import build_reference
from meshwright.models.trace import trace_module
from meshwright.parallel.recompute import selective_contexts
from meshwright.spec.model_spec import Bytes, ModelSpec
from meshwright.spec.shape import DecoderShape
from meshwright.train.loss import token_cross_entropy

SEQ = 24
VOCAB = 83


def decoder_shape(name: str, **changes: Any) -> DecoderShape:
    """Sizes that divide into nothing in particular."""
    shape = DecoderShape(
        name=name, n_layers=2, d_model=24, n_heads=6, n_kv_heads=6 if name == "gpt2" else 2, head_dim=4, d_ff=56,
        vocab_size=VOCAB, max_seq_len=SEQ, dropout=0.0, tied_embeddings=name == "gpt2", norm_eps=1e-5, rope_theta=1e4,
    )  # fmt: skip
    return replace(shape, **changes)


@dataclass(frozen=True, slots=True)
class Case:
    """A model with what it is trained on."""

    model: nn.Module
    loss: Callable[..., Any]
    batch_of: Callable[[int], Any]
    seq_len: int

    def trace(self, compute: str = "fp32", kernels: str = "cpu", **options: Any) -> ModelSpec:
        """As a rank would have it traced."""
        selective = partial(selective_contexts, "block")
        return trace_module(
            self.model, self.loss, self.batch_of, compute=compute, kernels=kernels, seq_len=self.seq_len, name="it",
            selective=selective, **options,
        )  # fmt: skip


def tokens(size: int, seq_len: int = SEQ) -> dict[str, torch.Tensor]:
    row = torch.arange(size * seq_len).reshape(size, seq_len) % VOCAB
    return {"tokens": row, "labels": row.clone()}


def decoder(name: str, **changes: Any) -> Case:
    return Case(build_reference(decoder_shape(name, **changes), seed=0), token_cross_entropy, tokens, SEQ)


def tied_and_frozen() -> Case:
    """A Llama with a tied head, whose embedding and first block get no gradient."""
    case = decoder("llama", tied_embeddings=True)
    for part in (case.model.embedding, case.model.blocks[0]):
        part.requires_grad_(False)
    return case


class Classifier(nn.Module):
    """An encoder of torch.nn over vectors, and a head on their mean."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 40, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Images(nn.Module):
    """Two stages of convolutions, between which the width changes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first, self.down = nn.Sequential(Block(8), Block(8)), nn.Conv2d(8, 12, 2, stride=2)
        self.second = nn.Sequential(Block(12), Block(12), Block(12))
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.down(self.first(self.stem(x)))).mean((2, 3)))


def squared(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    out = model(batch["x"])
    return (out.float() ** 2).sum(), len(out)


def vectors(*shape: int) -> Callable[[int], dict[str, torch.Tensor]]:
    return lambda size: {"x": torch.linspace(-1, 1, size * torch.Size(shape).numel()).reshape(size, *shape)}


class Single(nn.Module):
    """Nothing is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(10, 20), nn.Linear(20, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def bare_layers() -> Case:
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 30))
    return Case(model, squared, vectors(10), 1)


CASES: dict[str, Callable[[], Case]] = {
    "gpt2": partial(decoder, "gpt2", dropout=0.1),
    "llama": partial(decoder, "llama"),
    "tied and frozen": tied_and_frozen,
    "encoder of torch.nn": lambda: Case(Classifier(), squared, vectors(9, 16), 9),
    "convolutions": lambda: Case(Images(), squared, vectors(3, 8, 8), 1),
    "bare layers": bare_layers,
    "without blocks": lambda: Case(Single(), squared, vectors(10), 1),
}


@cache
def traced(name: str, compute: str = "fp32") -> ModelSpec:
    """The trace of a case without memory, for the CPU's kernels; made once for all tests."""
    return CASES[name]().trace(compute)


def at(form: Bytes, tokens: int) -> float:
    """Bytes for so many tokens."""
    return form.fixed + tokens * form.per_token


def kept_bytes(spec: ModelSpec, tokens: int, mode: str = "none") -> float:
    """All that a model keeps from forward to backward."""
    of_units = sum(unit.count * at(unit.saved[mode], tokens) for unit in spec.units)
    return of_units + at(spec.before, tokens) + at(spec.after, tokens) + at(spec.loss_kept, tokens)


def saved_by_autograd(case: Case, size: int) -> int:
    """Bytes that autograd saves in a real forward pass of the user's own module, each storage once; with the batch."""
    batch = case.batch_of(size)
    own = {t.untyped_storage()._cdata for t in [*case.model.parameters(), *case.model.buffers(), *batch.values()]}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in own:
            found[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total = case.loss(case.model, batch)[0]
    assert total.numel() == 1
    whole = [t.untyped_storage().nbytes() for t in found.values()]
    return sum(whole) + sum(t.untyped_storage().nbytes() for t in batch.values())
