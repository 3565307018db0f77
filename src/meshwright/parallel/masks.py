"""Dropout under tensor parallelism: the mask that one process would draw, and this rank's slice of it (contract 4).

All tp ranks seed their default generator alike (seeding.py), draw the whole mask and keep their part. That costs a
draw of the whole mask on every rank, and room for it at the draw.

Attention: on the CPU one process with dropout runs torch's plain (math) attention, whose mask is drawn for (b, h, s, s)
of all heads at once; here each rank does the same for its heads. Flash kernels on GPUs draw inside the kernel from the
place of a head in the tensor they are given, so their masks cannot be reproduced from a part of the heads: with dropout
above 0 GPUs run the plain attention too, and equal one process that runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.parallel.tensor_moves import TensorAxis


def part_dropout(x: Tensor, p: float, *, dim: int, whole: int, start: int) -> Tensor:
    """Dropout of a part, by its slice of the whole's mask.

    Args:
        x: indices start .. start + x.size(dim) of the whole along `dim`.
        p: probability of a zero; what is kept is scaled by 1 / (1 - p).
        dim: dimension that is cut.
        whole: its size uncut.
        start: first index that `x` has.
    """
    shape = list(x.shape)
    shape[dim] = whole
    with torch.no_grad():
        if x.device.type == "cpu":  # what F.dropout draws there, without the input and the product that it has beside
            mask = x.new_empty(shape).bernoulli_(1 - p).narrow(dim, start, x.size(dim)).clone().div_(1 - p)
        else:
            mask = F.dropout(x.new_ones(shape), p).narrow(dim, start, x.size(dim)).clone()
    return x * mask  # backward keeps the part alone


def drop_sequence(module: Any, axis: TensorAxis, x: Tensor) -> Tensor:
    """What a dropout module does to an even part of the sequence, (..., s / size, d)."""
    if not module.training or module.p == 0.0:
        return x
    here = x.size(-2)
    return part_dropout(x, module.p, dim=-2, whole=here * axis.size, start=here * axis.rank)


def drop_features(module: Any, whole: int, start: int, x: Tensor) -> Tensor:
    """What a dropout module does to a part of `whole` features that begins at `start`."""
    if not module.training or module.p == 0.0:
        return x
    return part_dropout(x, module.p, dim=-1, whole=whole, start=start)


def with_whole_masks(
    module: nn.Module, axis: TensorAxis, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The forward pass of an attention module that has its rank's part of the heads."""
    if not module.training:
        return forward(*args, **kwargs)
    with _WholeMasks(axis):
        return forward(*args, **kwargs)


@final
class _WholeMasks(TorchFunctionMode):
    """Inside, dropout of attention weights (b, h, s, s) of a rank's heads takes their slice of all heads' mask."""

    def __init__(self, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for every function of torch inside."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.dropout and args[0].ndim == 4:
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **rest: Any
    ) -> Tensor:
        """F.scaled_dot_product_attention of this rank's heads: q (b, h, s, c), k and v (b, k, s, c)."""
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, **rest)
        return plain_attention(q, k, v, attn_mask, lambda weights: self._dropout(weights, dropout_p), **rest)

    def _dropout(self, weights: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return weights
        here = weights.size(-3)
        return part_dropout(weights, p, dim=-3, whole=here * self.axis.size, start=here * self.axis.rank)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout: Callable[[Tensor], Tensor],
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention written out, as torch.nn.functional.scaled_dot_product_attention documents it.

    Args:
        q: (b, h, s, c).
        k: (b, k, t, c); with `enable_gqa` h may be a multiple of k.
        v: (b, k, t, c).
        attn_mask: broadcast to (b, h, s, t): True where a place is seen, or what is added to the scores.
        dropout: applied to the weights (b, h, s, t).
        is_causal: each place sees itself and what came before.
        scale: of the scores; 1 / sqrt(c) if None.
        enable_gqa: h / k neighbouring queries share a key and value head.
    """
    dtype = q.dtype
    if dtype in (torch.bfloat16, torch.float16):  # as torch's own math path has it
        q, k, v = q.float(), k.float(), v.float()
    if enable_gqa:
        shared = q.size(-3) // k.size(-3)
        k, v = k.repeat_interleave(shared, -3), v.repeat_interleave(shared, -3)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.size(-1)) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        is_seen = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_seen else scores + attn_mask
    weights = scores.softmax(-1)
    del scores  # their room is the mask's
    return (dropout(weights) @ v).to(dtype)
