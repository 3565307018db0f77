"""How a model is spread over a mesh. One line per axis, and the order is the lesson.

recompute changes what a block keeps; every wrapper after it sees the same block
pp        leaves out what other stages have: what follows need not know that there was more
tp        leaves this rank's part of every matrix: what follows sees a smaller model
dp        comes last: it acts on gradients, so it must see the parameters in their final form
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn as nn

from meshwright.errors import LayoutError
from meshwright.models.anatomy import parameters_in_order, repeated_blocks
from meshwright.models.hf_tensor import share_heads
from meshwright.parallel.cuts import Cut
from meshwright.parallel.entry import Parallel, Spreading
from meshwright.parallel.homes import homes_of
from meshwright.parallel.leaves import require_own_memory
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.mixed import cast_inputs, cast_weights
from meshwright.parallel.recompute import apply_recompute
from meshwright.parallel.replicated import replicate
from meshwright.parallel.sharded import shard_model
from meshwright.parallel.spread import Cutting, Spread
from meshwright.parallel.staged import run_stages
from meshwright.parallel.stages import keep_stages
from meshwright.parallel.tensor import cut_tensors, head_part
from meshwright.parallel.tensor_check import require_matches
from meshwright.parallel.tensor_loss import VocabularyPart
from meshwright.parallel.tensor_moves import TensorAxis
from meshwright.parallel.twins import Twin, parted_places, untie
from meshwright.parallel.units import find_units
from meshwright.spec.tensor_rules import empty_fault


def apply(model: nn.Module, mesh: Mesh, spread: Spread) -> Parallel:
    """Spread a model over the mesh; parameter names never change.

    Args:
        model: whole, equal on every rank, masters in fp32 (fp64 for compute = fp64); with `spread.fill`, its parameters
            on the meta device.
        mesh: the layout made real.
        spread: what else is asked.
    """
    blocks = [block for _, block in repeated_blocks(model)]
    layout = mesh.layout
    if spread.exact or layout.world_size > layout.dp_replicate:
        require_own_memory(parameters_in_order(model))
    apply_recompute(model, spread.recompute)
    cutting = _cut(model, mesh, spread)
    if cutting.staged is not None:
        parallel = run_stages(model, mesh, spread, cutting)
    elif layout.dp_shard > 1:
        parallel = shard_model(model, mesh, spread, cutting, blocks)
    else:
        parallel = replicate(model, mesh, spread, cutting)
    if spread.half is not None and layout.dp_shard == 1 and cutting.staged is None:
        parallel = cast_weights(parallel, blocks, spread.half)
    if spread.compute == "fp64":
        cast_inputs(model, torch.float64)  # a data set seldom gives fp64
    received = list if parallel.pipeline is None else parallel.pipeline.received
    spreading = Spreading(homes=cutting.homes, twins=cutting.twins, vocabulary=cutting.vocabulary, received=received)
    return dataclasses.replace(parallel, spreading=spreading)


def _cut(model: nn.Module, mesh: Mesh, spread: Spread) -> Cutting:
    """Leave what this rank has of the model: its stages, and of them its part of every matrix."""
    layout, homes = mesh.layout, homes_of(model, mesh)
    trained = [name for name, parameter in parameters_in_order(model) if parameter.requires_grad]
    uses = max((len(places) for places in parted_places(model)), default=1)
    if spread.tensor is not None:
        require_matches(model, spread.tensor)  # of the whole model: a stage has only some of the names
        fault = empty_fault(spread.tensor, {n: home.shape for n, home in homes.homes.items()}, layout.tp)
        if fault is not None and layout.dp_shard > 1:
            raise LayoutError(fault.where, fault.rule, fault.nearest)
    twins: list[Twin] = []
    units = find_units(model, spread.units) if layout.dp_shard > 1 and layout.pp == 1 else None
    if layout.pp > 1 or (spread.exact and layout.dp_shard > 1):
        twins = untie(model)
    staged = keep_stages(model, mesh, spread.schedule, spread.chunks) if layout.pp > 1 else None
    cuts, vocabulary = _cut_over_tp(model, mesh, spread) if layout.tp > 1 else ({}, None)
    placed = homes.placed(staged.owners if staged is not None else {}, cuts)
    here = {id(module) for module in model.modules()}
    both = [twin for twin in twins if id(twin.first.module) in here and id(twin.second.module) in here]
    return Cutting(
        homes=placed,
        trained=trained,
        uses=uses,
        twins=both,
        staged=staged,
        units=units,
        vocabulary=vocabulary,
    )


def _cut_over_tp(model: nn.Module, mesh: Mesh, spread: Spread) -> tuple[dict[str, Cut], VocabularyPart | None]:
    """Leave this rank's part of every matrix; and which logits the head then gives."""
    assert spread.tensor is not None and mesh.groups.tensor is not None, "tp has rules and a mesh"
    axis = TensorAxis(mesh.tp_rank, mesh.layout.tp, mesh.groups.tensor)
    cuts = cut_tensors(model, spread.tensor, axis, loss_parallel=spread.loss_parallel)
    share_heads(model)
    return cuts, head_part(spread.tensor, cuts, axis) if spread.loss_parallel else None
