"""The closed form of a decoder is what a trace of its module finds: real shapes of transformers, and our own models."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from meshwright.cost.closed_form import KERNELS, model_spec
from meshwright.models.hf_config import quiet
from meshwright.models.trace import trace_module
from meshwright.parallel.recompute import selective_contexts
from meshwright.spec.catalogue import decoder_of_shape
from meshwright.spec.families import read_decoder
from meshwright.spec.model_spec import Bytes, ModelSpec, UnitSpec
from meshwright.train.loss import token_cross_entropy
from models.traced import at, decoder_shape, tokens

KEPT = 0.001
"""Of what is kept: tables of chosen experts, seeds and counts are left out of the form, or rounded."""

WORKING = 0.04
"""Of what a layer keeps and works in together: the largest stage of a pass is written out, not its smallest tensors."""

LLAMA: dict[str, Any] = dict(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=2,
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_embd=1600, n_head=25, n_layer=2),
    "llama": LLAMA,
    "qwen2": LLAMA | dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4),
    "qwen3": LLAMA
    | dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128),
    "gemma2": LLAMA | dict(hidden_size=3584, num_attention_heads=16, head_dim=256),
    "gemma3_text": LLAMA | dict(hidden_size=2560, intermediate_size=10240, num_attention_heads=8, head_dim=256),
    "mistral": LLAMA | dict(sliding_window=256),
    "mixtral": LLAMA,
    "qwen3_moe": LLAMA | dict(hidden_size=2048, moe_intermediate_size=768, num_key_value_heads=4, num_experts=16),
    "deepseek_v3": dict(num_hidden_layers=2, first_k_dense_replace=2),
    "gpt_neox": dict(num_hidden_layers=2),
    "phi3": LLAMA | dict(hidden_size=3072, num_key_value_heads=32, pad_token_id=0),
}
"""Widths of published models, two layers and one vocabulary; what is left out is the family's own default."""


def traced(model: torch.nn.Module, seq_len: int, compute: str, kernels: str) -> ModelSpec:
    return trace_module(
        model, token_cross_entropy, partial(tokens, seq_len=seq_len), compute=compute, kernels=kernels,
        seq_len=seq_len, name="it", selective=partial(selective_contexts, "block"),
    )  # fmt: skip


def off(form: Bytes, trace: Bytes, count: int, beside: float = 0.0) -> float:
    """How far a form is from the trace, as a share of the trace and of what lives beside it."""
    return abs(at(form, count) - at(trace, count)) / (at(trace, count) + beside)


def layers(spec: ModelSpec) -> list[UnitSpec]:
    """One by one: a form has layers with and without a window apart, though they may keep as much."""
    return [unit for unit in spec.units for _ in range(unit.count)]


def require_equal(form: ModelSpec, trace: ModelSpec, count: int) -> None:
    """Every part of a form within its tolerance, and every number of parameters equal."""
    assert form.num_parameters == trace.num_parameters
    for part in ("before", "after", "loss_kept", "loss_peak"):
        assert off(getattr(form, part), getattr(trace, part), count) <= KEPT, part
    for one, other in zip(layers(form), layers(trace), strict=True):
        assert one.parameters == other.parameters
        assert (one.matmul_parameters, one.attention_width) == (other.matmul_parameters, other.attention_width)
        for mode in ("none", "selective", "full"):
            assert off(one.saved[mode], other.saved[mode], count) <= KEPT, mode
        whole = at(other.saved["none"], count)
        for peak in ("forward_peak", "backward_peak", "transient", "parted_kept", "parted_peak"):
            assert off(getattr(one, peak), getattr(other, peak), count, whole) <= WORKING, peak
        for mode, peak in one.recomputed_peak.items():
            assert off(peak, other.recomputed_peak[mode], count, at(other.saved[mode], count)) <= WORKING, mode


@pytest.mark.parametrize("family", SHAPES)
def test_a_decoder_of_transformers_keeps_what_the_closed_form_says(family) -> None:
    with quiet("the test"):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(family, vocab_size=50000, **SHAPES[family])
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        model.config.use_cache = False
        form = model_spec(read_decoder(config.to_dict(), family), seq_len=512, compute="bf16", kernels=KERNELS["hf"])
        require_equal(form, traced(model, 512, "bf16", "cuda"), 1024)


@pytest.mark.parametrize("compute", [pytest.param("fp32", marks=pytest.mark.matrix), "bf16"])
@pytest.mark.parametrize("kernels", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_reference_model_keeps_what_the_closed_form_says(name, kernels, compute) -> None:
    from meshwright.models.build import build_reference

    for dropout in (0.0, 0.1):
        shape = decoder_shape(name, d_model=96, n_heads=6, head_dim=16, d_ff=256, vocab_size=1000, dropout=dropout)
        form = model_spec(decoder_of_shape(shape), seq_len=64, compute=compute, kernels=KERNELS[kernels])
        require_equal(form, traced(build_reference(shape, 0), 64, compute, kernels), 128)


def test_the_published_layer_sizes_come_out() -> None:
    """MiB that a layer keeps of 8192 tokens in bf16, by hand: 8192 x (8 h + 8 + 4 a d + 4 k d + 4 a + 8 f)."""
    for name, sizes, expected in (
        ("llama", dict(d_model=4096, n_heads=32, n_kv_heads=32, head_dim=128, d_ff=11008), 1201.0625),
        ("llama", dict(d_model=4096, n_heads=32, n_kv_heads=8, head_dim=128, d_ff=14336), 1313.0625),
        ("gpt2", dict(d_model=4096, n_heads=32, n_kv_heads=32, head_dim=128, d_ff=16384), 1025.125),
    ):
        decoder = decoder_of_shape(decoder_shape(name, max_seq_len=8192, **sizes))
        (unit,) = model_spec(decoder, seq_len=8192, compute="bf16", kernels=KERNELS["cuda"]).units
        assert at(unit.saved["none"], 8192) / 2**20 == expected
        assert at(unit.saved["full"], 8192) / 2**20 == 64
