"""On the meta device, operators keep what CUDA's kernels would; outside a trace nothing is changed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.models.trace_kernels import cuda_kernels, grouped_products

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default


class Seen(TorchDispatchMode):
    """The operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def heads(dtype=torch.bfloat16, number=4, length=32, width=16) -> torch.Tensor:
    return torch.empty(2, number, length, width, dtype=dtype, device="meta", requires_grad=True)


def attention_operator(query, key, value, **options) -> str:
    with cuda_kernels(), Seen() as seen:
        out = F.scaled_dot_product_attention(query, key, value, **options)
        out.sum().backward()
    assert out.shape == (*query.shape[:-1], value.shape[-1])
    names = {FLASH: "flash", EFFICIENT: "efficient"}
    return next((names[op] for op in seen.operators if op in names), "plain")


@pytest.mark.parametrize(
    ("query", "key", "value", "options", "expected"),
    [
        (heads(), heads(), heads(), dict(is_causal=True), "flash"),
        (heads(torch.float16), heads(torch.float16), heads(torch.float16), {}, "flash"),
        (heads(), heads(number=2), heads(number=2), dict(is_causal=True, enable_gqa=True), "flash"),
        (heads(), heads(), heads(), dict(dropout_p=0.1), "flash"),
        (heads(width=20), heads(width=20), heads(width=20), {}, "flash"),
        (heads(width=264), heads(width=264), heads(width=264), {}, "efficient"),
        (heads(), heads(length=40), heads(length=40), dict(is_causal=True), "efficient"),
        (heads(width=24), heads(width=24), heads(width=16), {}, "efficient"),
        (heads(torch.float32), heads(torch.float32), heads(torch.float32), dict(is_causal=True), "efficient"),
        (heads(), heads(), heads(), dict(attn_mask=torch.empty(32, 32, dtype=torch.bool, device="meta")), "efficient"),
        (heads(torch.float64), heads(torch.float64), heads(torch.float64), {}, "plain"),
        (heads(torch.float32, width=10), heads(torch.float32, width=10), heads(torch.float32, width=10), {}, "plain"),
        (heads(torch.float32), heads(torch.float32, 2), heads(torch.float32, 2), dict(enable_gqa=True), "plain"),
    ],
    ids=[
        "bf16 causal", "fp16", "grouped", "dropout", "padded width", "wide heads", "causal, more keys than queries",
        "narrower values", "fp32", "mask", "fp64", "fp32 of odd width", "fp32 grouped",
    ],
)  # fmt: skip
def test_attention_takes_the_kernel_that_cuda_would_choose(query, key, value, options, expected) -> None:
    assert attention_operator(query, key, value, **options) == expected


def test_an_attention_inside_torch_nn_is_reached_too() -> None:
    x = torch.empty(2, 9, 16, dtype=torch.bfloat16, device="meta")
    module = nn.MultiheadAttention(16, 4, batch_first=True, device="meta", dtype=torch.bfloat16)
    with cuda_kernels(), Seen() as seen:
        module(x, x, x, need_weights=False)
    assert FLASH in seen.operators


def kept(make) -> list[tuple[torch.dtype, int]]:
    """Dtype and numbers of what autograd saves, in the order in which it does."""
    found: list[tuple[torch.dtype, int]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.append((tensor.dtype, tensor.numel()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        make()
    return found


def test_dropout_keeps_one_byte_a_number() -> None:
    x = torch.empty(10, 7, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with cuda_kernels():
        assert kept(lambda: F.dropout(x, 0.1)) == [(torch.bool, 70)]
        assert kept(lambda: F.dropout(x, 0.1, training=False)) == kept(lambda: F.dropout(x, 0.0)) == []


def test_rms_norm_keeps_its_input_and_a_number_a_row() -> None:
    x = torch.empty(10, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    norm = nn.RMSNorm(8, device="meta", dtype=torch.bfloat16)
    rows = [(torch.bfloat16, 80), (torch.bfloat16, 8), (torch.float32, 10)]
    with cuda_kernels():
        assert kept(lambda: norm(x)) == rows
        assert (torch.float32, 80) in kept(lambda: norm.float()(x))  # fused kernels take equal types only
        norm.bfloat16()(x).sum().backward()
    assert x.grad.shape == x.shape and norm.weight.grad.shape == (8,)


def test_nothing_is_left_changed() -> None:
    x = torch.empty(10, 7, device="meta", requires_grad=True)
    before = kept(lambda: F.dropout(x, 0.1))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), cuda_kernels(), grouped_products():
            raise ZeroDivisionError
        assert kept(lambda: F.dropout(x, 0.1)) == before != [(torch.bool, 70)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_have_their_shapes_in_every_type(dtype) -> None:
    rows = torch.empty(24, 16, dtype=dtype, device="meta", requires_grad=True)
    experts = torch.empty(3, 16, 32, dtype=dtype, device="meta", requires_grad=True)
    with grouped_products():
        out = torch._grouped_mm(rows, experts, offs=torch.empty(3, dtype=torch.int32, device="meta"))
        out.sum().backward()
    assert out.shape == (24, 32) and rows.grad.shape == rows.shape and experts.grad.shape == experts.shape
