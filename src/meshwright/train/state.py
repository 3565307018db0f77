"""What a training consists of, piece by piece: weights, buffers and optimizer state, cut or whole on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from meshwright.models.digest import Hasher, state_items
from meshwright.parallel.leaves import Leaf, local, whole
from meshwright.train.optimizer import named_state
from meshwright.train.tensorfile import Entry

COUNTERS: Final = frozenset({"step", "mu_product", "eta", "mu"})
"""Optimizer state that is one number for a whole parameter, in every optimizer of torch.optim that has it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a training.

    Attributes:
        name: in its file.
        part: this rank's part of it.
        like: what it is cut like.
    """

    name: str
    part: torch.Tensor
    like: torch.Tensor

    @property
    def is_cut(self) -> bool:
        """Does another rank have the rest of it?"""
        return isinstance(self.like, DTensor) and self.part.ndim > 0

    @property
    def entry(self) -> Entry:
        """What it is when whole."""
        return Entry(self.name, self.part.dtype, tuple((self.like if self.is_cut else self.part).shape))

    def whole(self) -> torch.Tensor:
        """All of it; collective where it is cut."""
        return whole(self.part, self.like)


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint holds besides its manifest.

    Attributes:
        model: bare module.
        optimizer: its optimizer.
        leaves: what the optimizer trains in the parameters' places.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    leaves: Sequence[Leaf]

    def weights(self) -> list[Piece]:
        """Parameters and persistent buffers, a tied tensor once."""
        return [Piece(name, local(tensor), tensor) for name, tensor in state_items(self.model)]

    def moments(self) -> list[Piece]:
        """Optimizer state as `STATE/PARAMETER`; a number is a tensor of no dimension."""
        leaves, pieces = {leaf.name: leaf for leaf in self.leaves}, []
        for key, tensor in named_state(self.optimizer).items():
            kind, _, name = key.partition("/")
            part = tensor.detach() if kind in COUNTERS else leaves[name].part(tensor)
            pieces.append(Piece(key, part, leaves[name].parameter))
        return pieces


def digest_of(pieces: Sequence[Piece], speaks: bool) -> str:
    """`weights_sha256` of pieces, gathered one at a time; collective. Empty on ranks that do not speak."""
    hasher = Hasher()
    for piece in sorted(pieces, key=lambda piece: piece.name):
        if speaks or piece.is_cut:
            tensor = piece.whole()
            if speaks:
                hasher.add(piece.name, tensor)
    return hasher.hexdigest() if speaks else ""
