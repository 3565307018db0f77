"""CUDA's choice of kernels, on the meta device: what autograd then keeps is what it keeps on a GPU.

Four operators are made of others everywhere but on CUDA, and would keep more, or less, than there:

    attention    flash, else memory-efficient, else plain products, by PyTorch's own rules (sdp_utils.cpp); the fused
                 ones keep queries, keys, values, the result and an fp32 log-sum-exp, and never the scores
    dropout      one kernel, which keeps a mask of 1 byte a number
    RMSNorm      one kernel, which keeps its input and 1/rms, and no wide copies

Registered for meta tensors, so that it holds whoever calls the operator: torch.nn.functional, or C++ below it.
Not followed: cuDNN's attention, which keeps as much as flash, and kernels that are no part of PyTorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import _scoped_library

aten = torch.ops.aten


@contextmanager
def grouped_products() -> Iterator[None]:
    """Inside, products of grouped rows know their size in every type; torch has it for bf16 alone."""
    with _scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced
        library.impl("_grouped_mm", _grouped_product, "Meta")
        yield


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Inside, meta tensors go through the operators that CUDA would choose."""
    with _scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that kernels are replaced, which torch says as it does so
        library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        library.impl("dropout", _dropout, "AutogradMeta")
        library.impl("rms_norm", _rms_norm, "AutogradMeta")
        yield


def _grouped_product(
    rows: Tensor, others: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Rows (m, k) x groups (g, k, n) -> (m, n); rows (m, k) x (k, n), grouped along k -> (g, m, n)."""
    dtype = out_dtype or rows.dtype
    if rows.ndim == 2 and others.ndim == 2:
        assert offs is not None
        return rows.new_empty((offs.numel(), rows.size(0), others.size(1)), dtype=dtype)
    return rows.new_empty((*rows.shape[:-1], others.size(-1)), dtype=dtype)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Query (b, h, s, c), key (b, k, t, c), value (b, k, t, e) -> (b, h, s, e)."""
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.full((), float("-inf"), dtype=query.dtype))
    if mask is None and _takes_flash(query, key, value, is_causal, enable_gqa):
        width = query.size(-1)
        query, key, value = (_padded(x) for x in (query, key, value))
        made = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        result: Tensor = made[0]
        return result if result.size(-1) == width else result[..., :width]
    if _takes_efficient(query, key, value):
        bias = None if mask is None else mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
        made = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )
    else:
        math = aten._scaled_dot_product_attention_math
        made = math(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    attended: Tensor = made[0]
    return attended


def _takes_flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> bool:
    """16-bit, equal widths up to 256, as many heads or grouped ones, and causal only with as many queries as keys."""
    if query.ndim != 4 or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    widths = {query.size(-1), key.size(-1), value.size(-1)}
    is_square, has_heads = query.size(-2) == key.size(-2), enable_gqa or query.size(1) == key.size(1)
    return len(widths) == 1 and query.size(-1) <= 256 and has_heads and (is_square or not is_causal)


def _takes_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """As many keys as queries in heads, not fp64, and widths that are whole vectors of 16 bytes."""
    if query.ndim != 4 or query.dtype == torch.float64 or query.size(1) != key.size(1):
        return False
    vector = 16 // query.element_size()
    return query.size(-1) == key.size(-1) and not query.size(-1) % vector and not value.size(-1) % vector


def _padded(x: Tensor) -> Tensor:
    """Flash wants widths that are multiples of 8."""
    rest = x.size(-1) % 8
    return F.pad(x, (0, 8 - rest)) if rest else x


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return x
    if p == 1:
        return x * torch.zeros_like(x)
    return torch.native_dropout(x, p, True)[0]


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Fused, except where input and weight differ in type."""
    if weight is None or weight.dtype == x.dtype:
        out: Tensor = _FusedRmsNorm.apply(x, weight, len(shape))  # type: ignore[no-untyped-call]
        return out
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = tuple(range(-len(shape), 0))
    return (wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + (eps or 0.0))).type_as(x) * weight


class _FusedRmsNorm(torch.autograd.Function):
    """Keeps what the fused kernel keeps; computes nothing.

    aten._fused_rms_norm itself is made of other operators everywhere but on CUDA.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        rstd = x.new_empty([*x.shape[:-dims], *[1] * dims], dtype=wide)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        of_weight = None if weight is None or not ctx.needs_input_grad[1] else torch.empty_like(weight)
        return torch.empty_like(x) if ctx.needs_input_grad[0] else None, of_weight, None
