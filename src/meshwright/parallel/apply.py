"""How a model is spread over a mesh. One line per axis, and the order is the lesson.

Recompute comes first: it changes what a block keeps, and every wrapper after it sees the same block. Data parallelism
comes last: it acts on gradients, so it must see the parameters in their final form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn

from meshwright.models.anatomy import parameters_in_order, repeated_blocks
from meshwright.models.built import Fill
from meshwright.models.casting import COMPUTE_DTYPES
from meshwright.parallel.ddp import apply_ddp
from meshwright.parallel.entry import Entry, Parallel
from meshwright.parallel.exact import ExactReplicas, ExactShards
from meshwright.parallel.fsdp import Sharded, ShardRules, give_memory, shard
from meshwright.parallel.gradients import Gradients
from meshwright.parallel.leaves import Leaf, local, padded_leaf, plain_leaf, require_own_memory, rows_here
from meshwright.parallel.mesh import Mesh, data_parallel_mesh
from meshwright.parallel.mixed import cast_around, cast_inputs, cast_weights
from meshwright.parallel.recompute import apply_recompute
from meshwright.parallel.shards import ShardGradients
from meshwright.parallel.units import Units, find_units
from meshwright.spec.nearest import first_of


def _nobody(name: str) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What is asked of the parallel room, besides the layout.

    Attributes:
        recompute: none | selective | full.
        compute: fp32 | bf16 | fp16 | fp64.
        may_skip_parameters: some parameters may get no gradient in some steps.
        exact: sum gradients exactly.
        elementwise: the optimizer updates each weight from its own gradient and state alone.
        num_microbatches: of a step, all ranks together.
        units: patterns of the modules that ZeRO gathers one at a time; None for the repeated blocks.
        timeout_s: how long a collective waits.
        entered: told the name of each unit of ZeRO as it is called.
        fill: gives each parameter its values once it has been cut; None if the model has them.
    """

    recompute: str
    compute: str
    may_skip_parameters: bool
    exact: bool = False
    elementwise: bool = True
    num_microbatches: int = 1
    units: Sequence[str] | None = None
    timeout_s: float = 50.0
    entered: Callable[[str], None] = _nobody
    fill: Fill | None = None

    @property
    def half(self) -> torch.dtype | None:
        """The type that weights are cast to; None where masters compute."""
        return COMPUTE_DTYPES[self.compute] if self.compute in ("bf16", "fp16") else None


def apply(model: nn.Module, mesh: Mesh, spread: Spread) -> Parallel:
    """Spread a model over the mesh; parameter names never change.

    Args:
        model: whole, equal on every rank, masters in fp32 (fp64 for compute = fp64); with `spread.fill`, its parameters
            on the meta device.
        mesh: the layout made real.
        spread: what else is asked.
    """
    blocks = [block for _, block in repeated_blocks(model)]
    if spread.exact or mesh.layout.dp_shard > 1:
        require_own_memory(parameters_in_order(model))
    apply_recompute(model, spread.recompute)
    if mesh.layout.dp_shard > 1:
        parallel = _cut(model, mesh, spread, blocks)
    elif spread.exact:
        parallel = _whole_exact(model, mesh, spread)
    else:
        parallel = apply_ddp(model, mesh, spread.may_skip_parameters)
    if spread.half is not None and mesh.layout.dp_shard == 1:
        return cast_weights(parallel, blocks, spread.half)
    if spread.compute == "fp64":
        cast_inputs(model, torch.float64)  # a data set seldom gives fp64
    return parallel


def _whole_exact(model: nn.Module, mesh: Mesh, spread: Spread) -> Parallel:
    """Whole weights on every rank, or on the only one. No DDP: its sums round, and are made during backward."""
    leaves = [padded_leaf(name, p) for name, p in parameters_in_order(model) if p.requires_grad]
    gradients = ExactReplicas(leaves, spread.num_microbatches, mesh.rank, mesh.layout.dp_degree)
    return Parallel(model, Entry(model), gradients, announce=lambda reduce, last: None)


def _cut(model: nn.Module, mesh: Mesh, spread: Spread, blocks: Sequence[nn.Module]) -> Parallel:
    """ZeRO in one of its stages, alone or in replicas."""
    units = find_units(model, spread.units)
    wide = spread.exact or spread.compute == "fp64"
    rules = ShardRules(
        mesh=data_parallel_mesh(mesh, spread.timeout_s),
        zero_stage=mesh.layout.zero_stage,
        param_dtype=spread.half,
        reduce_dtype=torch.float64 if wide else torch.float32,
        may_skip_parameters=spread.may_skip_parameters,
        entered=spread.entered,
    )
    cut = shard(model, units.modules, rules)
    if spread.fill is not None:
        give_memory(cut.entry, mesh.device)
        for name, parameter in parameters_in_order(model):
            spread.fill(name, local(parameter), rows_here(parameter))
    if spread.half is not None:
        cast_around(model, [*blocks, *units.modules], spread.half, lambda: True)

    def announce(reduce: bool, last: bool) -> None:
        cut.ends.wanted.reduce, cut.ends.wanted.last = reduce, last
        cut.switches.announce(reduce, last)

    def require_same() -> None:
        numbers = torch.tensor(cut.calls.numbers(), dtype=torch.float64, device=mesh.device)
        dist.all_reduce(numbers)
        cut.calls.require_same(numbers.tolist(), mesh.layout.dp_degree)

    def before_backward(objective: torch.Tensor) -> torch.Tensor:
        cut.calls.require_all()
        return cut.ends.before_backward(objective)

    return Parallel(
        model,
        cut.entry,
        _of_shards(cut, mesh, spread),
        announce,
        before_backward,
        cut.switches.reshard,
        notes=_about(units, spread),
        require_same=require_same,
    )


def _of_shards(cut: Sharded, mesh: Mesh, spread: Spread) -> Gradients:
    """How the gradients of a cut model are summed."""
    ranks, counts = mesh.layout.dp_degree, mesh.dp_rank < mesh.layout.dp_shard
    if spread.exact:
        leaves = [padded_leaf(name, p) for name, p in cut.parameters]
        n = spread.num_microbatches
        return ExactShards(leaves, n, counts=counts, world_size=ranks, taps=cut.taps, calls=cut.calls)
    leaves = [plain_leaf(n, p) if spread.elementwise else Leaf(n, p, p) for n, p in cut.parameters]
    looks = spread.may_skip_parameters
    return ShardGradients(leaves, counts=counts, taps=cut.taps, looks=looks, calls=cut.calls, ranks=ranks)


def _about(units: Units, spread: Spread) -> tuple[str, ...]:
    """What the user should know of how the model was divided."""
    if units.sharing:
        names = first_of(units.sharing)
        return (f"ZeRO gathers {names} with the rest of the model: they share parameters with modules outside",)
    if not units.modules:
        what = "no repeated blocks were found" if spread.units is None else "the model itself is the only unit"
        return (f"ZeRO gathers the whole model at once: {what}; layout.units names modules to gather one at a time",)
    return ()
