"""How a model is spread over a mesh. One line per axis, and the order is the lesson.

Recompute comes first: it changes what a block keeps, and every wrapper after it sees the same block. Data parallelism
comes last: it acts on gradients, so it must see the parameters in their final form.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn as nn

from meshwright.models.anatomy import repeated_blocks
from meshwright.parallel.ddp import apply_ddp
from meshwright.parallel.entry import Parallel
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.mixed import cast_inputs, cast_weights
from meshwright.parallel.recompute import apply_recompute

COMPUTE_DTYPES: Final = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def apply(model: nn.Module, mesh: Mesh, *, recompute: str, compute: str, may_skip_parameters: bool) -> Parallel:
    """Spread a model over the mesh; parameter names never change.

    Args:
        model: whole, equal on every rank, masters in fp32 (fp64 for compute = fp64).
        mesh: the layout made real.
        recompute: none | selective | full.
        compute: fp32 | bf16 | fp16 | fp64.
        may_skip_parameters: some parameters may get no gradient in some steps.
    """
    blocks = [block for _, block in repeated_blocks(model)]
    apply_recompute(model, recompute)
    parallel = apply_ddp(model, mesh, may_skip_parameters)
    if compute in ("bf16", "fp16"):
        return cast_weights(parallel, blocks, COMPUTE_DTYPES[compute])
    if compute == "fp64":
        cast_inputs(model, COMPUTE_DTYPES[compute])  # a data set seldom gives fp64
    return parallel
