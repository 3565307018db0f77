"""What a training consists of, piece by piece: weights, buffers and optimizer state, cut or whole on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from meshwright.models.digest import Hasher, state_items
from meshwright.parallel.entry import Spreading
from meshwright.parallel.homes import Homes
from meshwright.parallel.leaves import Leaf, local, whole
from meshwright.train.optimizer import named_state
from meshwright.train.tensorfile import Entry

COUNTERS: Final = frozenset({"step", "mu_product", "eta", "mu"})
"""Optimizer state that is one number for a whole parameter, in every optimizer of torch.optim that has it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a training.

    Attributes:
        entry: what it is when whole.
        of: the parameter or buffer that it is, or is state of.
        part: this rank's part of it; None if this rank's pipeline stages have none.
        like: what it is cut like.
        homes: where tensors live.
    """

    entry: Entry
    of: str
    part: torch.Tensor | None
    like: torch.Tensor | None
    homes: Homes

    @property
    def name(self) -> str:
        """In its file."""
        return self.entry.name

    @property
    def is_cut(self) -> bool:
        """Does another rank have the rest of it?"""
        is_sharded = isinstance(self.like, DTensor) and self.part is not None and self.part.ndim > 0
        return is_sharded or self.homes.is_spread

    def whole(self) -> torch.Tensor | None:
        """All of it, on rank 0 at least; collective where it is cut."""
        if self.homes.is_spread:
            return self.homes.whole(self.of, self.part, self.like)
        assert self.part is not None and self.like is not None
        return whole(self.part, self.like)


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint holds besides its manifest.

    Attributes:
        model: bare module.
        optimizer: its optimizer.
        leaves: what the optimizer trains in the parameters' places.
        spreading: where tensors live.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    leaves: Sequence[Leaf]
    spreading: Spreading

    @property
    def homes(self) -> Homes:
        """Where tensors live."""
        return self.spreading.homes

    def here(self) -> list[tuple[str, torch.Tensor]]:
        """This rank's parameters and persistent buffers, by their first names; twins of tied ones are none."""
        first, seconds = self.homes.first_name, {id(twin.second.parameter) for twin in self.spreading.twins}
        return [(first.get(name, name), t) for name, t in state_items(self.model) if id(t) not in seconds]

    def weights(self) -> list[Piece]:
        """Parameters and persistent buffers, a tied tensor once."""
        here, pieces = dict(self.here()), []
        for name, home in self.homes.homes.items():
            like = here.get(name)
            dtype = home.dtype if like is None else like.dtype
            part = None if like is None else local(like)
            pieces.append(Piece(Entry(name, dtype, home.shape), name, part, like, self.homes))
        return pieces

    def moments(self) -> list[Piece]:
        """Optimizer state as `STATE/PARAMETER`; a number is a tensor of no dimension. Collective under pp."""
        leaves, parts = {leaf.name: leaf for leaf in self.leaves}, dict[str, torch.Tensor]()
        for key, tensor in named_state(self.optimizer).items():
            kind, _, name = key.partition("/")
            parts[key] = tensor.detach() if kind in COUNTERS else leaves[name].part(tensor)
        entries = {key: self._entry(key, part, leaves[key.partition("/")[2]].parameter) for key, part in parts.items()}
        pieces = []
        for key, entry in self._everywhere(entries).items():
            name = key.partition("/")[2]
            like = leaves[name].parameter if name in leaves else None
            pieces.append(Piece(entry, name, parts.get(key), like, self.homes))
        return pieces

    def _entry(self, key: str, part: torch.Tensor, like: torch.Tensor) -> Entry:
        """What a piece of the optimizer's state is when whole."""
        home = self.homes.of(key.partition("/")[2])
        is_cut = home.cut is not None or isinstance(like, DTensor)
        return Entry(key, part.dtype, home.shape if is_cut and part.ndim else tuple(part.shape))

    def _everywhere(self, mine: dict[str, Entry]) -> dict[str, Entry]:
        """The entries of all stages of a pipeline, in the sorted order of their names."""
        group = self.homes.mesh.groups.pp
        if group is None:
            return mine
        everyone: list[dict[str, Entry]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, mine, group=group)
        together = {key: entry for entries in reversed(everyone) for key, entry in entries.items()}
        return dict(sorted(together.items()))


def digest_of(pieces: Sequence[Piece], speaks: bool) -> str:
    """`weights_sha256` of pieces, gathered one at a time; collective. Empty on ranks that do not speak."""
    hasher = Hasher()
    for piece in sorted(pieces, key=lambda piece: piece.name):
        if speaks or piece.is_cut:
            tensor = piece.whole()
            if speaks and tensor is not None:
                hasher.add(piece.name, tensor)
    return hasher.hexdigest() if speaks else ""
