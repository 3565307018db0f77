"""Where every tensor of a model lives: on which stage of a pipeline, which part on a tp rank, which rows under ZeRO.

    whole  --pp-->  on one stage, or both ends (a tied table)  --tp-->  a part along a dimension  --dp_shard-->  rows

The cuts nest in this order, so the part of a rank is found by asking them from the right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from meshwright.models.anatomy import bare_name
from meshwright.models.built import Index
from meshwright.models.digest import state_items
from meshwright.parallel.cuts import Cut
from meshwright.parallel.leaves import rows_here, whole
from meshwright.parallel.letters import receive_tensor, send_tensor
from meshwright.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """One parameter or persistent buffer.

    Attributes:
        name: the first of its names in the whole model.
        shape: whole.
        dtype: of the masters.
        stage: the pp rank that answers for it; of a tied table the one that has its first name.
        cut: over tp; None where every tp rank has all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int = 0
    cut: Cut | None = None


@dataclass(frozen=True, slots=True)
class Homes:
    """The homes of a whole model; the same on every rank but for the parts that `Home.cut` names.

    Attributes:
        mesh: this rank.
        homes: in the sorted order of names.
        first_name: for each name of a tied tensor the first of its names.
    """

    mesh: Mesh
    homes: Mapping[str, Home] = field(default_factory=dict)
    first_name: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str) -> Home:
        """The home of a tensor by any of its names."""
        return self.homes[self.first_name.get(name, name)]

    def index(self, name: str, like: torch.Tensor) -> Index:
        """The part of a whole tensor that this rank has.

        Args:
            name: any of its names.
            like: the parameter as it is here; its rows may be cut by ZeRO.
        """
        home = self.of(name)
        if home.cut is None and not isinstance(like, DTensor):
            return ()
        index = list(home.cut.index) if home.cut is not None else [slice(0, size) for size in home.shape]
        if isinstance(like, DTensor) and index:
            rows, first = rows_here(like), index[0].start
            stop = index[0].stop if rows.stop is None else first + rows.stop
            index[0] = slice(first + (rows.start or 0), stop)
        return tuple(index)

    def whole(self, name: str, part: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
        """All parts of a tensor put together, on rank 0 at least; collective over all ranks.

        Args:
            name: any of its names.
            part: this rank's part, or state of the optimizer in its shape; None where this stage has none.
            like: the parameter as it is here.
        """
        home, mesh = self.of(name), self.mesh
        found = None
        if mesh.pp_rank == home.stage:
            assert part is not None and like is not None, name
            found = self._over_tp(home, whole(part, like)) if part.ndim else part
        return found if home.stage == 0 else self._to_first(home.stage, found)

    def _over_tp(self, home: Home, part: torch.Tensor) -> torch.Tensor:
        """Put the tp parts together; part: this rank's, of home.cut.local_shape."""
        cut, group = home.cut, self.mesh.groups.tp
        if cut is None or cut.dim is None or group is None:
            return part
        ends = torch.tensor([cut.start, cut.stop], device=part.device)
        all_ends = [torch.empty_like(ends) for _ in range(self.mesh.layout.tp)]
        dist.all_gather(all_ends, ends, group=group)
        spans = [tuple(pair.tolist()) for pair in all_ends]
        longest = max(stop - start for start, stop in spans)
        shape = [longest if dim == cut.dim else size for dim, size in enumerate(cut.shape)]
        mine = part.new_zeros(shape)
        mine.narrow(cut.dim, 0, cut.stop - cut.start).copy_(part)
        parts = [torch.empty_like(mine) for _ in spans]
        dist.all_gather(parts, mine, group=group)
        together = part.new_empty(cut.shape)
        for (start, stop), piece in zip(spans, parts, strict=True):
            together.narrow(cut.dim, start, stop - start).copy_(piece.narrow(cut.dim, 0, stop - start))
        return together

    def _to_first(self, stage: int, found: torch.Tensor | None) -> torch.Tensor | None:
        """Send a tensor from its stage to the first one, where rank 0 writes; the other lines of ranks need not."""
        mesh = self.mesh
        if mesh.dp_rank or mesh.tp_rank or mesh.pp_rank not in (0, stage):
            return found
        owner = stage * (mesh.layout.world_size // mesh.layout.pp)
        if found is None:
            return receive_tensor(owner, mesh.groups.pp, mesh.device)
        send_tensor(found, 0, mesh.groups.pp)
        return found

    @property
    def is_spread(self) -> bool:
        """Do tp or pp cut anything? Then every tensor takes all ranks to put together."""
        return self.mesh.layout.tp * self.mesh.layout.pp > 1

    def placed(self, stages: Mapping[str, int], cuts: Mapping[str, Cut]) -> Homes:
        """The same, once it is known what pipeline stages have and how tp cuts.

        Args:
            stages: by name the pp rank that answers for a tensor; the first for what is not named.
            cuts: by any name of a parameter.
        """
        by_first = {self.first_name.get(name, name): cut for name, cut in cuts.items()}
        homes = {
            name: replace(home, stage=stages.get(name, 0), cut=by_first.get(name)) for name, home in self.homes.items()
        }
        return replace(self, homes=homes)


def homes_of(model: nn.Module, mesh: Mesh) -> Homes:
    """Look at a model, bare and whole, before anything of it is cut."""
    tensors = [(bare_name(name), t) for name, t in model.state_dict(keep_vars=True).items()]
    first = {id(tensor): name for name, tensor in state_items(model)}
    homes = {
        name: Home(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in state_items(model)
    }
    return Homes(mesh, homes, {name: first[id(tensor)] for name, tensor in tensors if id(tensor) in first})
