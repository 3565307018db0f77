"""ZeRO in one of its stages, alone or in replicas, around a model that runs in one stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn

from meshwright.parallel.entry import Parallel
from meshwright.parallel.exact import ExactShards
from meshwright.parallel.fsdp import Sharded, ShardRules, add_twins, shard
from meshwright.parallel.gradients import Gradients
from meshwright.parallel.kin import kin_of
from meshwright.parallel.leaves import Leaf, padded_leaf, plain_leaf
from meshwright.parallel.materialise import give_memory, give_values
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.mixed import cast_around
from meshwright.parallel.replicated import exact_rules
from meshwright.parallel.shards import ShardGradients
from meshwright.parallel.spread import Cutting, Spread
from meshwright.parallel.units import Units
from meshwright.spec.nearest import first_of


def shard_model(
    model: nn.Module, mesh: Mesh, spread: Spread, cutting: Cutting, blocks: Sequence[nn.Module]
) -> Parallel:
    """Cut a model over dp_shard.

    Args:
        model: bare; what tp has left of it.
        mesh: the layout made real.
        spread: what is asked.
        cutting: what is known of it.
        blocks: its repeated blocks.
    """
    units = cutting.units
    assert units is not None, "ZeRO has units"
    cut = shard(model, units.modules, rules_of(mesh, spread))
    if spread.fill is not None:
        give_memory(cut.entry, mesh.device)
        give_values(model, cutting.homes, spread.fill)
    if spread.half is not None:
        cast_around(model, [*blocks, *units.modules], spread.half, lambda: True)

    def announce(reduce: bool, last: bool) -> None:
        cut.ends.wanted.reduce, cut.ends.wanted.last = reduce, last
        cut.switches.announce(reduce, last)

    def require_same() -> None:
        numbers = torch.tensor(cut.calls.numbers(), dtype=torch.float64, device=mesh.device)
        dist.all_reduce(numbers)
        cut.calls.require_same(numbers.tolist(), mesh.layout.world_size)

    def before_backward(objective: torch.Tensor) -> torch.Tensor:
        cut.calls.require_all()
        return cut.ends.before_backward(objective)

    return Parallel(
        model,
        cut.entry,
        _gradients(cut, mesh, spread, cutting),
        announce,
        before_backward,
        cut.switches.reshard,
        notes=_about(units, spread),
        require_same=require_same,
    )


def rules_of(mesh: Mesh, spread: Spread) -> ShardRules:
    """How FSDP cuts here."""
    assert mesh.groups.data is not None, "dp_shard has a mesh"
    wide = spread.exact or spread.compute == "fp64"
    return ShardRules(
        mesh=mesh.groups.data,
        zero_stage=mesh.layout.zero_stage,
        param_dtype=spread.half,
        reduce_dtype=torch.float64 if wide else torch.float32,
        may_skip_parameters=spread.may_skip_parameters,
        entered=spread.entered,
    )


def _gradients(cut: Sharded, mesh: Mesh, spread: Spread, cutting: Cutting) -> Gradients:
    """How the gradients of a cut model are summed."""
    counts, ranks = mesh.dp_rank < mesh.layout.dp_shard, mesh.layout.world_size
    seconds = {id(twin.second.parameter): twin for twin in cutting.twins}
    named = [(name, parameter) for name, parameter in cut.parameters if id(parameter) not in seconds]
    kin = [kin_of(name, cutting.homes) for name, _ in named]
    if not spread.exact:
        leaves = [plain_leaf(n, p) if spread.elementwise else Leaf(n, p, p) for n, p in named]
        looks = spread.may_skip_parameters
        return ShardGradients(leaves, counts=counts, taps=cut.taps, looks=looks, calls=cut.calls, ranks=ranks, kin=kin)
    leaves = [padded_leaf(name, parameter) for name, parameter in named]
    numbers = {name: i for i, (name, _) in enumerate(named)}
    tapped = [numbers[cutting.homes.first_name.get(name, name)] for name, _ in cut.parameters]
    twins = [twin.second.parameter for twin in cutting.twins]
    add_twins(cut, cutting.twins)
    rules = exact_rules(mesh, spread, cutting, counts=counts)
    return ExactShards(leaves, kin, rules, tapped=tapped, twins=twins, taps=cut.taps, calls=cut.calls)


def _about(units: Units, spread: Spread) -> tuple[str, ...]:
    """What the user should know of how the model was divided."""
    if units.sharing:
        names = first_of(units.sharing)
        return (f"ZeRO gathers {names} with the rest of the model: they share parameters with modules outside",)
    if not units.modules:
        what = "no repeated blocks were found" if spread.units is None else "the model itself is the only unit"
        return (f"ZeRO gathers the whole model at once: {what}; layout.units names modules to gather one at a time",)
    return ()
