"""One block by itself: what it keeps and needs in each recompute mode, and how much it computes.

A block is measured where the model calls it, with the very arguments that it is called with. Its output is let go
before its backward pass, as the next block's input is, and the gradient of its output is made by that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
import torch.nn as nn
from torch.distributed.pipelining._backward import stage_backward_input
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, noop_context_fn
from torch.utils.flop_counter import flop_registry

from meshwright.models.trace_memory import LiveBytes, storage_key, tensors_in

Contexts = Callable[[], Any]
"""What torch.utils.checkpoint takes as `context_fn`."""

aten = torch.ops.aten

FULL: Final[Mapping[str, Contexts]] = {"full": noop_context_fn}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes of one block in one recompute mode, its inputs apart.

    Attributes:
        kept: made in its forward pass and kept until backward; not its output.
        forward_peak: the most at once in its forward pass.
        backward_peak: the most at once in its backward pass, gradients of parameters apart.
        parted_kept: of a backward pass in two, what the pass of inputs keeps for that of weights beyond `kept`; 0 where
            the block cannot be passed so.
        parted_peak: the most at once in the pass of inputs.
        matmul_flops: of products with parameters, forward.
        attention_flops: of products without, and of fused attention, each query with all keys; forward.
    """

    kept: int
    forward_peak: int
    backward_peak: int
    parted_kept: int = 0
    parted_peak: int = 0
    matmul_flops: int
    attention_flops: int


def measure(
    block: nn.Module,
    forward: Callable[..., Any],
    call: tuple[Any, Any],
    outer: LiveBytes,
    modes: Mapping[str, Contexts],
) -> dict[str, Measured]:
    """Run a block forward and backward in each mode: `none`, and those of `modes`.

    Args:
        block: the module.
        forward: its forward, as it was before anything was wrapped around it.
        call: the arguments and keyword arguments that it is called with.
        outer: the watch over the whole model, inside which this runs.
        modes: recompute modes, with what torch.utils.checkpoint needs for each.
    """
    plain = _run(block, forward, call, outer)
    kept, peak = _parted(block, forward, call, outer)
    found = {"none": replace(plain, parted_kept=max(kept - plain.kept, 0), parted_peak=peak)}
    for mode, contexts in modes.items():

        def recomputed(*args: Any, contexts: Contexts = contexts, **kwargs: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

        found[mode] = _run(block, recomputed, call, outer)
    return found


def _run(block: nn.Module, forward: Callable[..., Any], call: tuple[Any, Any], outer: LiveBytes) -> Measured:
    args, kwargs = tree_map_only(torch.Tensor, _fresh, call)
    flops = Flops(block)
    with outer.apart(flops) as lives:
        output = forward(*args, **kwargs)
        flops.counts = False
        end, handed_on = lives.now, {id(life) for life in lives.lives_of(output)}
        kept = sum(life.nbytes for life in lives.living() if id(life) not in handed_on)
        begin = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        start = _OutputGradients.apply(*begin) if begin else None  # type: ignore[no-untyped-call]
        del output, begin
        if start is not None:
            torch.autograd.backward(start, start.detach())
    gradients = [p.grad for p in block.parameters() if p.grad is not None]
    backward_peak = lives.peak(end, without=lives.lives_of(gradients))
    for parameter in block.parameters():
        parameter.grad = None
    return Measured(
        kept=kept,
        forward_peak=lives.peak(0, end),
        backward_peak=backward_peak,
        matmul_flops=flops.matmul,
        attention_flops=flops.attention,
    )


def _parted(block: nn.Module, forward: Callable[..., Any], call: tuple[Any, Any], outer: LiveBytes) -> tuple[int, int]:
    """Bytes between the backward pass of inputs and that of weights, and the most in the first of them.

    As a zero-bubble schedule runs them (parallel/pipeline.py). The gradients of the inputs do not count as kept: they
    go to the stage before.
    """
    args, kwargs = tree_map_only(torch.Tensor, _fresh, call)
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    weights = [parameter for parameter in block.parameters() if parameter.requires_grad]
    with outer.apart() as lives:
        outputs = [tensor for tensor in tensors_in(forward(*args, **kwargs)) if tensor.requires_grad]
        if not inputs or not weights or not outputs:
            return 0, 0
        own, gradients = lives.lives_of(outputs), [torch.zeros_like(tensor) for tensor in outputs]
        end = lives.now
        try:
            sent, groups = stage_backward_input(outputs, gradients, inputs, iter(weights))
        except RuntimeError:  # an output that cannot be detached, or a block that torch cannot pass in two
            return 0, 0
        apart = {id(life) for life in [*own, *lives.lives_of(sent)]}
        kept = sum(life.nbytes for life in lives.living() if id(life) not in apart)
        peak = lives.peak(end, without=own)
        del groups
    return kept, peak


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage as the start of a graph of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


class _OutputGradients(torch.autograd.Function):
    """Takes the place of all that follows a block: keeps nothing, and makes the gradients of the block's outputs."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.makes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in outputs]
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.makes)


def _grouped(rows: torch.Tensor, weights: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Rows (m, k) sorted by expert times weights (experts, k, n): each row meets one of them."""
    return 2 * rows.numel() * weights.shape[-1] if rows.ndim == 2 and weights.ndim == 3 else 0


_FORMULAS: Final[dict[Any, Callable[..., Any]]] = {
    **flop_registry,
    aten._grouped_mm: _grouped,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
}
_BATCHED: Final = (aten.bmm, aten.baddbmm)


@final
class Flops:
    """Counts the arithmetic of products as they run, by PyTorch's own formulas (torch.utils.flop_counter).

    Batched products without a parameter are taken for scores.
    """

    def __init__(self, block: nn.Module) -> None:
        self._weights = {storage_key(parameter) for parameter in block.parameters()}
        self.matmul = self.attention = 0
        self.counts = True

    def __call__(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Look at one operator."""
        packet = func._overloadpacket
        formula = _FORMULAS.get(packet) if self.counts else None
        if formula is None:
            return
        number = int(formula(*args, **kwargs, out_val=result))
        is_batched = packet in _BATCHED and not any(storage_key(t) in self._weights for t in tensors_in((args, kwargs)))
        if is_batched or "attention" in str(packet):
            self.attention += number
        else:
            self.matmul += number
