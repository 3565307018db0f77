"""Whole parameters on every data-parallel rank: by DDP, or summed exactly."""

from __future__ import annotations

import torch.nn as nn

from meshwright.models.anatomy import parameters_in_order
from meshwright.parallel.ddp import apply_ddp
from meshwright.parallel.entry import Entry, Parallel
from meshwright.parallel.exact import ExactReplicas, ExactRules
from meshwright.parallel.kin import kin_of
from meshwright.parallel.leaves import padded_leaf
from meshwright.parallel.materialise import materialise
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.spread import Cutting, Spread
from meshwright.parallel.uses import Uses


def replicate(model: nn.Module, mesh: Mesh, spread: Spread, cutting: Cutting) -> Parallel:
    """Spread a model over dp_replicate alone.

    Args:
        model: bare; what tp has left of it.
        mesh: the layout made real.
        spread: what is asked.
        cutting: what is known of it.
    """
    materialise(model, cutting.homes, spread.fill, mesh.device)
    if spread.exact:
        return _exact(model, mesh, spread, cutting)
    kin = [kin_of(n, cutting.homes) for n, p in parameters_in_order(model) if p.requires_grad]
    return apply_ddp(model, mesh, spread.may_skip_parameters, kin if mesh.layout.tp > 1 else None)


def _exact(model: nn.Module, mesh: Mesh, spread: Spread, cutting: Cutting) -> Parallel:
    """No DDP: its sums round, and are made during backward."""
    leaves = [padded_leaf(name, p) for name, p in parameters_in_order(model) if p.requires_grad]
    uses = Uses(model, leaves)
    kin = [kin_of(leaf.name, cutting.homes) for leaf in leaves]
    gradients = ExactReplicas(leaves, kin, exact_rules(mesh, spread, cutting), uses.further)
    return Parallel(model, Entry(model), gradients, lambda reduce, last: uses.put(), settle=uses.take_away)


def exact_rules(mesh: Mesh, spread: Spread, cutting: Cutting, *, counts: bool = True) -> ExactRules:
    """What exact sums need to know, from what is known of a model."""
    layout = mesh.layout
    return ExactRules(
        names=cutting.trained,
        num_microbatches=spread.num_microbatches,
        uses=cutting.uses,
        ranks=layout.world_size,
        dp_rank=mesh.dp_rank,
        dp_degree=layout.dp_degree,
        dp=mesh.groups.dp,
        counts=counts,
    )
