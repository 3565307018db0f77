"""Engine: how a training program holds, gathers and frees memory. meshwright's own is what the planner prices.

The others are there so that the same formulas can be checked against what other programs are published to have used
(`make validate`). Every number is a count of things that live at once, or a measured overhead with its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What a program does besides the arithmetic.

    Attributes:
        name: of the program.
        compute_bytes: of a number of the compute type.
        copies: weights are copied to the compute type for a step where nothing is cut (data parallelism, one device).
        gathered_blocks: blocks that ZeRO-3 has gathered at once while one computes: it, and one more, as it came.
        reduce_bytes: of a gradient element on its way through a reduce-scatter.
        reduce_blocks: blocks whose reduce-scatter inputs live at once.
        regathers_norms: TP gathers a norm's output again in backward in place of keeping it whole.
        pipeline_keeps_gathered: with pipeline stages, ZeRO-3 does not free weights between microbatches.
        harvests: with pipeline stages gradients are taken from the parameters after each backward pass, added up whole,
            and reduced when the schedule is over; ZeRO-3 frees a block after its forward pass (parallel/harvest.py).
        scatter_copies: of its input, that a reduce-scatter makes: gloo works on a clone.
        bucket_bytes: per parameter, of communication buckets besides the gradients (data parallelism).
        keeps_last_reduction: ZeRO holds the root's reduce-scatter input until the next microbatch's backward pass.
        exact: gradients are summed exactly: converted once they are whole, and squared in limbs for the norm.
        update_bytes: per parameter of this rank, of what the optimizer needs for a moment.
        sequence_parallel: TP cuts the residual stream and the norms too.
        receives_all: a pipeline stage has a receive buffer for each microbatch (torch.distributed.pipelining).
        keeps_outputs: a stage keeps the outputs of the microbatches that are in flight.
        cuts_by_cost: stages of a pipeline are cut by what layers and head cost (spec/stage_cut.py), as meshwright runs
            them; else by the number of layers, as Megatron-LM's and torchtitan's are.
        keeps_logits: the last stage keeps the logits of all microbatches of a step.
        loss_cached_bytes: per logit, of freed blocks at the loss that nothing later fits into; reserved, not allocated.
        caches_transient: the same of one block's forward pass.
        workspace_bytes: of math libraries, inside the allocator.
        allocator_low: reserved / (allocated + cached) of a quiet allocator.
        allocator_high: the same of a fragmented one; a verdict is made on it.
        context_bytes: of the device's context and libraries, outside the allocator.
        communicator_bytes: of one communicator of more than one rank.
    """

    name: str
    compute_bytes: int
    copies: bool = True
    gathered_blocks: float = 2.0
    reduce_bytes: float = 4.0
    reduce_blocks: float = 1.0
    regathers_norms: bool = False
    pipeline_keeps_gathered: bool = True
    scatter_copies: float = 0.0
    bucket_bytes: float = 0.0
    keeps_last_reduction: bool = True
    exact: bool = False
    update_bytes: float = 0.0
    sequence_parallel: bool = True
    receives_all: bool = True
    keeps_outputs: bool = True
    cuts_by_cost: bool = False
    harvests: bool = False
    keeps_logits: bool = False
    loss_cached_bytes: float = 0.0
    caches_transient: bool = True
    workspace_bytes: float = 0.08 * GIB
    allocator_low: float = 1.015
    allocator_high: float = 1.08
    context_bytes: float = 0.75 * GIB
    communicator_bytes: float = 0.5 * GIB


def own_engine(compute_bytes: int, *, exact: bool = False) -> Engine:
    """What meshwright does on GPUs.

    Logits in 16 bits are freed once they have been cast to fp32, and their room is too small for what comes after.
    """
    return Engine(
        name="meshwright",
        compute_bytes=compute_bytes,
        reduce_bytes=8.0 if exact or compute_bytes == 8 else 4.0,
        exact=exact,
        cuts_by_cost=True,
        harvests=True,
        loss_cached_bytes=float(compute_bytes) if compute_bytes < 4 else 0.0,
    )


def process_engine(compute_bytes: int, *, exact: bool = False) -> Engine:
    """What meshwright does on CPU processes, whose memory no caching allocator holds.

    The context is what a rank has before it trains: Python, torch and its libraries, about 0.4 GiB of its own.
    """
    return Engine(
        name="meshwright on CPU processes",
        compute_bytes=compute_bytes,
        reduce_bytes=8.0 if exact or compute_bytes == 8 else 4.0,
        exact=exact,
        cuts_by_cost=True,
        harvests=True,
        scatter_copies=1.0,
        caches_transient=False,
        workspace_bytes=0.0,
        allocator_low=1.0,
        allocator_high=1.1,
        context_bytes=0.4 * GIB,
        communicator_bytes=0.0,
    )
