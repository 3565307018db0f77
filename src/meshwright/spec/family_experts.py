"""Decoders with experts, from config.json: which layers have them, how many, and what every token passes besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.errors import SpecError
from meshwright.spec.decoder import Attention, DecoderSpec, FeedForward
from meshwright.spec.family_config import FamilyConfig
from meshwright.spec.family_parts import Windows, attention, chosen_windows, decoder, dense, same_window


def mixtral(config: FamilyConfig) -> DecoderSpec:
    """Mixtral: Mistral with experts in place of each feed-forward."""
    branch = _experts(config, "num_local_experts", "intermediate_size")
    return decoder(config, attention(config), branch, windows=same_window(config))


def gpt_oss(config: FamilyConfig) -> DecoderSpec:
    """gpt-oss: biases everywhere, the router among them; a learned sink for each head; every other layer a window."""
    bias = config.flag("attention_bias")
    heads = replace(attention(config, qkv_bias=bias, out_bias=bias), sinks=True)
    branch = replace(_experts(config, "num_local_experts", "intermediate_size"), bias=True, router_bias=True)
    slides = [i % 2 == 0 for i in range(config.size("num_hidden_layers"))]
    return decoder(config, heads, branch, windows=chosen_windows(config, slides))


def qwen2_moe(config: FamilyConfig) -> DecoderSpec:
    """Qwen2-MoE: an expert that every token passes through a gate of its own, beside the routed ones."""
    branch = replace(
        _experts(config, "num_experts", "moe_intermediate_size"),
        d_ff_shared=config.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    heads = attention(config, qkv_bias=config.flag("qkv_bias"))
    return decoder(config, heads, _qwen_branches(config, branch), windows=_qwen2_moe_windows(config))


def qwen3_moe(config: FamilyConfig) -> DecoderSpec:
    """Qwen3-MoE: Qwen3 with experts in most layers or in all."""
    bias = config.flag("attention_bias")
    heads = replace(attention(config, qkv_bias=bias, out_bias=bias), qk_norm="head")
    branch = _experts(config, "num_experts", "moe_intermediate_size")
    windows = same_window(config) if config.flag("use_sliding_window") else ()
    return decoder(config, heads, _qwen_branches(config, branch), windows=windows)


def deepseek(config: FamilyConfig) -> DecoderSpec:
    """DeepSeek-V2 and V3: compressed keys and values; the first layers dense; shared experts beside the routed ones.

    The extra prediction layers of V3 (num_nextn_predict_layers) are not counted: transformers does not build them.
    """
    shared = (config.size_or_none("n_shared_experts") or 0) * config.size("moe_intermediate_size")
    biased = config.flag("mlp_bias")
    branch = _experts(config, "n_routed_experts", "moe_intermediate_size")
    branch = replace(branch, d_ff_shared=shared, shared_bias=biased)
    first, layers = config.size("first_k_dense_replace"), range(config.size("num_hidden_layers"))
    plain = dense(config, bias=biased)
    return decoder(config, _compressed(config), [plain if i < first else branch for i in layers])


def _experts(config: FamilyConfig, number: str, width: str) -> FeedForward:
    """Routed experts.

    Raises:
        SpecError: a token passes more of them than there are.
    """
    experts, passed = config.size(number), config.size("num_experts_per_tok")
    if passed > experts:
        rule = f"{passed} of {config.spelling(number)} = {experts}: a token passes at most all of them."
        raise SpecError(config.where("num_experts_per_tok"), rule, f"Nearest that works: {experts}.")
    return FeedForward(gated=True, d_ff=config.size(width), n_experts=experts, top_k=passed)


def _qwen_branches(config: FamilyConfig, branch: FeedForward) -> Sequence[FeedForward]:
    """Experts in each decoder_sparse_step-th layer, but not in those that `mlp_only_layers` names."""
    every, without = config.size("decoder_sparse_step"), config.entries("mlp_only_layers") or []
    layers, plain = range(config.size("num_hidden_layers")), dense(config)
    return [plain if i in without or (i + 1) % every else branch for i in layers]


def _qwen2_moe_windows(config: FamilyConfig) -> Windows:
    """A window in every other one of the first max_window_layers, if windows are used."""
    layers = range(config.size("num_hidden_layers"))
    if not config.flag("use_sliding_window"):
        return [None for _ in layers]
    return chosen_windows(config, [i % 2 == 0 and i < config.size("max_window_layers") for i in layers])


def _compressed(config: FamilyConfig) -> Attention:
    """Multi-head latent attention. DeepSeek-V2, arXiv 2405.04434, section 2.1."""
    heads, bias = config.size("num_attention_heads"), config.flag("attention_bias")
    return Attention(
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=config.size("qk_nope_head_dim") + config.size("qk_rope_head_dim"),
        value_dim=config.size("v_head_dim"),
        qkv_bias=bias,
        out_bias=bias,
        q_rank=config.size_or_none("q_lora_rank") or 0,
        kv_rank=config.size("kv_lora_rank"),
        rope_dim=config.size("qk_rope_head_dim"),
    )
