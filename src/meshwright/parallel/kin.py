"""Ranks that hold the same part of a parameter, and see gradients of it that are yet to be added up.

Data-parallel ranks are no kin in this sense: their sum is made where gradients are reduced. Kin are

    tp       a norm that works on a part of the sequence, a key and value head that several ranks hold
    ends     a table that is tied over the first and the last stage of a pipeline

Their sums are made once a step, after all backward passes, for all such parameters at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.parallel.homes import Homes
from meshwright.parallel.mesh import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Kin:
    """Of one leaf.

    Attributes:
        tp: ranks to sum its gradient over first; None if none.
        ends: to sum it over then; None if none.
        counts: is this rank's part one of those that make up the norm?
    """

    tp: Group = None
    ends: Group = None
    counts: bool = True

    @property
    def sums(self) -> bool:
        """Is there anything to add up?"""
        return self.tp is not None or self.ends is not None


def kin_of(name: str, homes: Homes, *, is_tied: bool = False) -> Kin:
    """The kin of a parameter here.

    Args:
        name: any of its names.
        homes: of the model.
        is_tied: does the other end of the pipeline have it too?
    """
    mesh, home = homes.mesh, homes.of(name)
    cut = home.cut
    copies = 1 if cut is None else cut.copies
    answers = mesh.tp_rank % copies == 0 and mesh.pp_rank == home.stage
    return Kin(
        tp=mesh.groups.copies.get(copies) if cut is not None and cut.partial else None,
        ends=mesh.groups.ends if is_tied else None,
        counts=answers,
    )


def sum_over_kin(parts: Sequence[torch.Tensor], kin: Sequence[Kin]) -> None:
    """Add up, in place, what kin have; one all-reduce for each group, and nothing where there are none. Collective.

    Args:
        parts: gradients, those of a leaf without one as zeros.
        kin: of each.
    """
    for picked in ([one.tp for one in kin], [one.ends for one in kin]):
        for group in {id(group): group for group in picked if group is not None}.values():
            _sum_over(group, [part for part, its in zip(parts, picked, strict=True) if its is group])


def _sum_over(group: Group, parts: Sequence[torch.Tensor]) -> None:
    """One all-reduce of several tensors, in place."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat, group=group)
    for part, summed in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
        part.copy_(summed.view_as(part))
