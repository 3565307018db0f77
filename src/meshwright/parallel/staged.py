"""A pipeline around the stages that a rank has been left, with data parallelism in each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.nn as nn

from meshwright.models.anatomy import parameters_in_order
from meshwright.parallel.entry import Entry, Parallel
from meshwright.parallel.fsdp import require_cuttable, shard_sections, units_of
from meshwright.parallel.gradients import Gradients
from meshwright.parallel.harvest import ExactStages, Harvest, Source, StageGradients, StageRules
from meshwright.parallel.kin import kin_of
from meshwright.parallel.leaves import Leaf, padded_leaf, plain_leaf
from meshwright.parallel.materialise import give_memory, give_values, materialise
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.mixed import Copies, cast_before
from meshwright.parallel.pipeline import Pipeline, PipelineRules
from meshwright.parallel.replicated import exact_rules
from meshwright.parallel.sharded import rules_of
from meshwright.parallel.spread import Cutting, Spread
from meshwright.parallel.stages import Staged
from meshwright.parallel.twins import Place


def run_stages(model: nn.Module, mesh: Mesh, spread: Spread, cutting: Cutting) -> Parallel:
    """Make a pipeline of this rank's stages.

    Args:
        model: bare; what pp and tp have left of it.
        mesh: the layout made real.
        spread: what is asked.
        cutting: what is known of it.
    """
    staged = cutting.staged
    assert staged is not None, "a pipeline has stages"
    copies = _data_parallel(model, mesh, spread, cutting, staged)
    if spread.half is not None:
        blocks = [block for section in staged.sections.values() for block in section.blocks]
        cast_before(blocks, spread.half, lambda: copies is None or copies.active)
    rules = PipelineRules(
        schedule=spread.schedule,
        num_stages=staged.num_stages,
        num_microbatches=spread.num_microbatches // mesh.layout.dp_degree,
        inputs=torch.float64 if spread.compute == "fp64" else spread.half,
        upcast=spread.half is not None,
    )
    pipeline, units = Pipeline(mesh, staged.sections, rules), units_of(staged.sections.values())

    def announce(reduce: bool, last: bool) -> None:
        if copies is not None:
            copies.put()

    def settle() -> None:
        for unit in units:
            unit.reshard()
        if copies is not None:
            copies.take_away()

    gradients = _gradients(model, mesh, spread, cutting, staged)
    return Parallel(model, Entry(model), gradients, announce, settle=settle, pipeline=pipeline)


def _data_parallel(model: nn.Module, mesh: Mesh, spread: Spread, cutting: Cutting, staged: Staged) -> Copies | None:
    """Cut the stages over dp_shard, or give them memory as they are; copies of weights where they compute in half."""
    if mesh.layout.dp_shard == 1:
        materialise(model, cutting.homes, spread.fill, mesh.device)
        return None if spread.half is None else Copies(model, spread.half, apart=True)
    require_cuttable(parameters_in_order(model))
    shard_sections(staged.sections.values(), dataclasses.replace(rules_of(mesh, spread), reduce_dtype=None))
    if spread.fill is not None:
        for section in staged.sections.values():
            give_memory(section, mesh.device)
        give_values(model, cutting.homes, spread.fill)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(mesh.device)
    return None


def _gradients(model: nn.Module, mesh: Mesh, spread: Spread, cutting: Cutting, staged: Staged) -> Gradients:
    """How the gradients of the stages are summed."""
    homes, layout = cutting.homes, mesh.layout
    seconds = {id(twin.second.parameter) for twin in cutting.twins}
    named = [
        (homes.first_name.get(name, name), parameter)
        for name, parameter in parameters_in_order(model)
        if parameter.requires_grad and id(parameter) not in seconds
    ]
    sources = _sources(model, staged, {name: i for i, (name, _) in enumerate(named)}, homes.first_name)
    parted = _parted(homes.first_name, staged)
    kin = [kin_of(name, homes, is_tied=name in parted) for name, _ in named]
    counts = mesh.dp_rank < layout.dp_shard if layout.dp_shard > 1 else mesh.dp_rank == 0
    if spread.exact:
        leaves = [padded_leaf(name, parameter) for name, parameter in named]
        whole = layout.dp_shard == 1  # then each replica takes its share of the norm
        rules = exact_rules(mesh, spread, cutting, counts=counts or whole)
        return ExactStages(leaves, kin, rules, sources, mesh.groups)
    leaves = [plain_leaf(n, p) if spread.elementwise else Leaf(n, p, p) for n, p in named]
    dtype = torch.float64 if spread.compute == "fp64" else torch.float32
    harvest = Harvest(sources, dtype)
    told = StageRules(names=cutting.trained, groups=mesh.groups, counts=counts, dtype=dtype)
    return StageGradients(leaves, kin, harvest, told)


def _sources(
    model: nn.Module, staged: Staged, numbers: Mapping[str, int], first_name: Mapping[str, str]
) -> dict[int, Sequence[Source]]:
    """Where the gradients of each stage come from."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[int, Sequence[Source]] = {}
    for stage, section in staged.sections.items():
        sources = []
        for module in section.modules():
            for attribute in module._parameters:
                name = f"{names[id(module)]}.{attribute}" if id(module) in names else ""
                number = numbers.get(first_name.get(name, name))
                if number is not None:
                    sources.append((Place(module, attribute, name), number))
        found[stage] = sources
    return found


def _parted(first_name: Mapping[str, str], staged: Staged) -> set[str]:
    """Tied parameters whose places are on different ranks: those of the first and of the last stage."""
    return {first for name, first in first_name.items() if staged.owners.get(name, 0) != staged.owners.get(first, 0)}
