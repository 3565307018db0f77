"""Gradients of a pipeline's stages: taken from the parameters as they come, summed over ranks at the end.

Why not by DDP and FSDP2: a schedule runs the backward passes of several microbatches before it is known which is the
last, and a zero-bubble schedule makes gradients of weights without the hooks that both rely on. So each backward pass
hands its gradients on here, they are added up in the type that the recipe sums in, and when the schedule is over

    replicas      one all-reduce a bucket
    ZeRO          one reduce-scatter a bucket, and one all-reduce of the parts where there are replicas (HSDP)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.parallel.arrivals import follow
from meshwright.parallel.exact import ExactGradients, ExactRules
from meshwright.parallel.gradients import Facts, Gradients, root, squares
from meshwright.parallel.kin import Kin, sum_over_kin
from meshwright.parallel.leaves import Leaf, local
from meshwright.parallel.mesh import Groups
from meshwright.parallel.twins import Place

BUCKET_BYTES: Final = 25 * 2**20
"""Of gradients that are reduced together, as in DDP."""

_reduce_scatter: Final[Callable[..., Any]] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""torch 2.13 renamed it and warns of the old name; 2.11 knows only that one."""

Source = tuple[Place, int]
"""Where a parameter is used, and the number of the leaf that its gradient is added to."""


@final
class Harvest:
    """Sums of gradients over the microbatches of a step, whole over dp_shard.

    Args:
        sources: by stage.
        dtype: of the sums.
        seen: seen(leaf, gradient) gives what is added in its place.
    """

    def __init__(
        self,
        sources: Mapping[int, Sequence[Source]],
        dtype: torch.dtype,
        seen: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._sources, self._dtype, self._seen = sources, dtype, seen
        self.sums: dict[int, torch.Tensor] = {}
        self.watches = False
        self.unsound: list[torch.Tensor] = []
        self._followed: dict[Place, weakref.ref[torch.Tensor]] = {}

    def take(self, stage: int) -> None:
        """Take what the parameters of a stage have; from now on each gradient goes as soon as it is there.

        Else all of a stage's would wait beside the sums for its backward pass to end. What is in a place may be another
        parameter than it was (ZeRO's gathered one, a copy in the compute type), so it is looked at again.
        """
        for place, number in self._sources[stage]:
            parameter = place.parameter
            self.move(number, parameter)
            followed = self._followed.get(place)
            if followed is None or followed() is not parameter:
                self._followed[place] = weakref.ref(parameter)
                follow(parameter, number, self)

    def move(self, number: int, parameter: torch.Tensor) -> None:
        """Add to a leaf's sum what a parameter has, if anything."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self._add(number, gradient)

    def _add(self, number: int, gradient: torch.Tensor) -> None:
        if self.watches:
            self.unsound.append(~gradient.isfinite().all())
        if self._seen is not None:
            gradient = self._seen(number, gradient)
        if number in self.sums:
            self.sums[number].add_(gradient)
        else:
            self.sums[number] = gradient.to(self._dtype)

    def clear(self) -> None:
        """A new step."""
        for sources in self._sources.values():
            for place, _ in sources:
                place.parameter.grad = None
        self.sums.clear()
        self.unsound.clear()


def reduced(
    leaves: Sequence[Leaf], sums: dict[int, torch.Tensor], groups: Groups, dtype: torch.dtype
) -> list[torch.Tensor]:
    """This rank's parts of the sums over all data-parallel ranks; empties `sums`. Collective.

    A leaf without a gradient here may have one elsewhere, so it takes part with zeros.
    """
    found: list[Any] = [None] * len(leaves)
    for bucket in _buckets(leaves, dtype.itemsize):
        cut = [i for i in bucket if isinstance(leaves[i].parameter, DTensor)]
        whole = [i for i in bucket if i not in cut]
        for numbers, reduce in ((cut, _scattered), (whole, _summed)):
            if numbers:
                gradients = [_of(leaves[i], sums.pop(i, None), dtype) for i in numbers]
                for i, part in zip(numbers, reduce([leaves[i] for i in numbers], gradients, groups), strict=True):
                    found[i] = part
    return found


def _of(leaf: Leaf, gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if gradient is not None:
        return gradient
    return torch.zeros(leaf.parameter.shape, dtype=dtype, device=local(leaf.parameter).device)


def _buckets(leaves: Sequence[Leaf], itemsize: int) -> Iterator[list[int]]:
    bucket: list[int] = []
    size = 0
    for i in reversed(range(len(leaves))):
        bucket.append(i)
        size += leaves[i].parameter.numel() * itemsize
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _summed(leaves: Sequence[Leaf], gradients: list[torch.Tensor], groups: Groups) -> list[torch.Tensor]:
    """Whole gradients of replicas; what was given is let go as soon as it is in the bucket."""
    if groups.dp is None:
        return gradients
    flat, shapes = torch.cat([gradient.reshape(-1) for gradient in gradients]), [each.shape for each in gradients]
    gradients.clear()
    dist.all_reduce(flat, group=groups.dp)
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _scattered(leaves: Sequence[Leaf], gradients: list[torch.Tensor], groups: Groups) -> list[torch.Tensor]:
    """Each shard rank's rows: as torch.chunk cuts them, with zeros behind until all have equally many.

    What was given is let go as soon as it is in the bucket.
    """
    ranks = dist.get_world_size(groups.shards)
    pieces = [_padded(gradient, ranks).view(ranks, -1) for gradient in gradients]
    together, widths = torch.cat(pieces, dim=1).reshape(-1), [piece.shape[1] for piece in pieces]
    gradients.clear()
    pieces.clear()
    mine = together.new_empty(together.numel() // ranks)
    _reduce_scatter(mine, together, group=groups.shards)
    if dist.get_world_size(groups.replicas) > 1:
        dist.all_reduce(mine, group=groups.replicas)
    parts = torch.split(mine, widths)
    heres = [local(leaf.parameter) for leaf in leaves]
    return [part[: here.numel()].view(here.shape) for part, here in zip(parts, heres, strict=True)]


def _padded(gradient: torch.Tensor, ranks: int) -> torch.Tensor:
    rows = -(-gradient.shape[0] // ranks) * ranks
    if rows == gradient.shape[0]:
        return gradient.contiguous()
    padded = gradient.new_zeros(rows, *gradient.shape[1:])
    padded[: gradient.shape[0]] = gradient
    return padded


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRules:
    """What sums over stages need to know besides their leaves.

    Attributes:
        names: of all trained parameters of the model, in an order that is the same on every rank.
        groups: of this rank.
        counts: is this rank's replica the one whose parts make up the norm?
        dtype: of the sums.
    """

    names: Sequence[str]
    groups: Groups
    counts: bool
    dtype: torch.dtype


@final
class StageGradients(Gradients):
    """Summed as floating-point numbers usually are.

    Args:
        leaves: of this rank's stages.
        kin: of each.
        harvest: of its gradients.
        rules: what else there is to know.
    """

    def __init__(self, leaves: Sequence[Leaf], kin: Sequence[Kin], harvest: Harvest, rules: StageRules) -> None:
        super().__init__(leaves, 1.0, kin)
        self.harvest, self._rules = harvest, rules
        self._parts: list[torch.Tensor] = []
        self._arrived: set[str] = set()
        self._idle: set[str] = set()

    def retry(self) -> str:
        """Sum over the ranks; never a second time."""
        self._arrived = {self.leaves[number].name for number in self.harvest.sums}
        self._parts = reduced(self.leaves, self.harvest.sums, self._rules.groups, self._rules.dtype)
        sum_over_kin(self._parts, self.kin)
        return ""

    def summed(self) -> torch.Tensor:
        """(1 + names,): the squares of this rank's parts, and which parameters had a gradient here."""
        parts = [part for part, kin in zip(self._parts, self.kin, strict=True) if kin.counts]
        device = local(self.leaves[0].parameter).device
        arrived = [float(name in self._arrived) for name in self._rules.names]
        flags = torch.tensor(arrived, dtype=torch.float64, device=device)
        return torch.cat([squares(parts, device, self._rules.counts), flags])

    def known(self) -> torch.Tensor:
        """Nothing: no rank has all."""
        return torch.zeros(0, dtype=torch.float64, device=local(self.leaves[0].parameter).device)

    def facts(self, summed: Sequence[float], known: Sequence[float]) -> Facts:
        """The norm, and what had a gradient on no rank."""
        square, *arrived = summed
        idle = [name for name, count in zip(self._rules.names, arrived, strict=True) if not count]
        self._idle = set(idle)
        return Facts(root(square), idle)

    def scale(self, factor: float) -> None:
        """Give the leaves their parts, scaled."""
        for i, leaf in enumerate(self.leaves):
            part = self._parts[i].to(leaf.leaf.dtype)
            gradient = _like(leaf, part.mul_(factor) if factor != 1.0 else part)
            leaf.leaf.grad = None if leaf.name in self._idle else gradient
        self._parts = []

    def watch(self) -> None:
        """Look at the numbers too."""
        self.harvest.watches = True

    def finite(self) -> bool:
        """Of what was harvested since it was asked last."""
        sound = not any(map(bool, self.harvest.unsound))
        self.harvest.unsound.clear()
        return sound

    def drop(self) -> None:
        """Forget all gradients."""
        super().drop()
        self.harvest.clear()
        self._parts = []


def _like(leaf: Leaf, part: torch.Tensor) -> torch.Tensor:
    """A gradient as the leaf is: a DTensor where the optimizer needs whole matrices."""
    return leaf.laid(part) if isinstance(leaf.leaf, DTensor) else part


@final
class ExactStages(ExactGradients):
    """On the grid, microbatch by microbatch and use by use, and summed without rounding.

    Args:
        leaves: of this rank's stages, padded.
        kin: of each.
        rules: what exact sums need to know.
        sources: where gradients come from, by stage.
        groups: of this rank.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        kin: Sequence[Kin],
        rules: ExactRules,
        sources: Mapping[int, Sequence[Source]],
        groups: Groups,
    ) -> None:
        super().__init__(leaves, kin, rules)
        self.harvest, self._groups = Harvest(sources, torch.float64, self.rounded), groups

    def _collect(self) -> list[torch.Tensor | None]:
        parts = reduced(self.leaves, self.harvest.sums, self._groups, torch.float64)
        sum_over_kin(parts, self.kin)
        return [part.to(leaf.parameter.dtype) for part, leaf in zip(parts, self.leaves, strict=True)]

    def _share(self, flat: torch.Tensor) -> torch.Tensor:
        if self._groups.data is not None or self._rules.dp_degree == 1:
            return flat
        return flat.tensor_split(self._rules.dp_degree)[self._rules.dp_rank]

    def drop(self) -> None:
        """Forget all gradients."""
        super().drop()
        self.harvest.clear()
