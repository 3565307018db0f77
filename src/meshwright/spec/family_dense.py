"""Decoders with one feed-forward in each layer, from config.json: each function is what one family does its own way."""

from __future__ import annotations

from dataclasses import replace

from meshwright.errors import SpecError
from meshwright.spec.decoder import DecoderSpec
from meshwright.spec.family_config import FamilyConfig
from meshwright.spec.family_parts import Windows, attention, chosen_windows, decoder, dense, head_dim, same_window


def llama(config: FamilyConfig) -> DecoderSpec:
    """Llama, Granite, Gemma: biases in all products of a branch, or in none."""
    bias = config.flag("attention_bias")
    return decoder(config, attention(config, qkv_bias=bias, out_bias=bias), dense(config, bias=config.flag("mlp_bias")))


def smollm3(config: FamilyConfig) -> DecoderSpec:
    """SmolLM3: Llama, in which the layers without rotary positions may have a window."""
    bias, branch = config.flag("attention_bias"), dense(config, bias=config.flag("mlp_bias"))
    return decoder(config, attention(config, qkv_bias=bias, out_bias=bias), branch, windows=_smollm3_windows(config))


def _smollm3_windows(config: FamilyConfig) -> Windows:
    """`no_rope_layers` marks layers without rotary positions by 0; by default each no_rope_layer_interval-th is one."""
    every, marks = config.size("no_rope_layer_interval"), config.entries("no_rope_layers")
    layers = range(config.size("num_hidden_layers"))
    if not config.flag("use_sliding_window"):
        return [None for _ in layers]
    if marks is not None and len(marks) < len(layers):
        raise SpecError(config.where("no_rope_layers"), f"has {len(marks)} entries for {len(layers)} layers.")
    return chosen_windows(config, [(i + 1) % every == 0 if marks is None else not marks[i] for i in layers])


def mistral(config: FamilyConfig) -> DecoderSpec:
    """Mistral, Phi-3: no biases, one window for all layers."""
    dropout = config.rate("resid_pdrop") if config.family == "phi3" else 0.0
    return decoder(config, attention(config), dense(config), windows=same_window(config), dropout=dropout)


def qwen2(config: FamilyConfig) -> DecoderSpec:
    """Qwen2: biases in query, key and value; a window from layer max_window_layers on, if any."""
    return decoder(config, attention(config, qkv_bias=True), dense(config), windows=_qwen_windows(config))


def qwen3(config: FamilyConfig) -> DecoderSpec:
    """Qwen3: a norm on each query and key head in place of Qwen2's biases."""
    bias = config.flag("attention_bias")
    heads = replace(attention(config, qkv_bias=bias, out_bias=bias), qk_norm="head")
    return decoder(config, heads, dense(config), windows=_qwen_windows(config))


def _qwen_windows(config: FamilyConfig) -> Windows:
    layers = range(config.size("num_hidden_layers"))
    if not config.flag("use_sliding_window"):
        return [None for _ in layers]
    return chosen_windows(config, [i >= config.size("max_window_layers") for i in layers])


def olmo2(config: FamilyConfig) -> DecoderSpec:
    """OLMo 2: norms behind each branch, and one over all queries and one over all keys."""
    bias = config.flag("attention_bias")
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    return decoder(config, replace(heads, qk_norm="full"), dense(config))


def gemma2(config: FamilyConfig) -> DecoderSpec:
    """Gemma 2 and 3: norms before and behind each branch; windows in every other layer, or in five of six."""
    bias, gemma3 = config.flag("attention_bias"), config.family == "gemma3_text"
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    every = config.size("sliding_window_pattern") if gemma3 else 2
    capped = bool(config.values["final_logit_softcapping"] or config.values["attn_logit_softcapping"])
    return decoder(
        config,
        replace(heads, qk_norm="head") if gemma3 else heads,
        dense(config),
        windows=chosen_windows(config, [(i + 1) % every != 0 for i in range(config.size("num_hidden_layers"))]),
        n_norms=4,
        softcap=capped,
    )


def gpt2(config: FamilyConfig) -> DecoderSpec:
    """GPT-2: learned positions, biases everywhere but in the head."""
    if config.flag("add_cross_attention"):
        rule = "is true: that is a decoder of an encoder, with one more attention in each layer."
        raise SpecError(config.where("add_cross_attention"), rule, "Nearest: false.")
    return decoder(
        config,
        attention(config, qkv_bias=True, out_bias=True),
        dense(config, gated=False, bias=True),
        norm="layer",
        learned_positions=config.size("max_position_embeddings"),
        dropout=config.rate("resid_pdrop"),
    )


def gpt_neox(config: FamilyConfig) -> DecoderSpec:
    """GPT-NeoX, Pythia: two norms a layer even where both branches read the same input."""
    bias = config.flag("attention_bias")
    return decoder(
        config,
        attention(config, qkv_bias=bias, out_bias=bias),
        dense(config, gated=False, bias=True),
        norm="layer",
        parallel=config.flag("use_parallel_residual"),
        dropout=config.rate("hidden_dropout"),
    )


def falcon(config: FamilyConfig) -> DecoderSpec:
    """Falcon: one key and value head (7B), a few (40B), or as many as query heads; one norm or two."""
    bias, new = config.flag("bias"), config.flag("new_decoder_architecture")
    heads = config.size("num_attention_heads")
    kv_heads = (config.size_or_none("num_key_value_heads") or heads) if new else heads
    if config.flag("multi_query") and not new:
        kv_heads = 1
    norms = config.size_or_none("num_ln_in_parallel_attn") or (2 if new else 1)
    return decoder(
        config,
        attention(config, qkv_bias=bias, out_bias=bias, kv_heads=kv_heads),
        dense(config, gated=False, bias=bias),
        n_norms=1 if config.flag("parallel_attn") and norms != 2 else 2,
        parallel=new or config.flag("parallel_attn"),
        norm="layer",
        dropout=config.rate("hidden_dropout"),
    )


def phi(config: FamilyConfig) -> DecoderSpec:
    """Phi-1, 1.5 and 2: one norm for both branches, biases everywhere, in the head too."""
    heads, width = attention(config, qkv_bias=True, out_bias=True), config.size("hidden_size")
    normed = config.flag("qk_layernorm")
    if normed and head_dim(config) * heads.n_heads != width:
        rule = f"is true, and such norms are hidden_size / num_attention_heads wide, not head_dim = {heads.head_dim}."
        raise SpecError(config.where("qk_layernorm"), rule, f"Nearest: head_dim = {width // heads.n_heads}.")
    return decoder(
        config,
        replace(heads, qk_norm="head") if normed else heads,
        dense(config, gated=False, bias=True),
        n_norms=1,
        parallel=True,
        norm="layer",
        head_bias=True,
        dropout=config.rate("resid_pdrop"),
    )


def starcoder2(config: FamilyConfig) -> DecoderSpec:
    """StarCoder2: grouped queries and a window, else built as GPT-2 is."""
    bias = config.flag("use_bias")
    return decoder(
        config,
        attention(config, qkv_bias=bias, out_bias=bias),
        dense(config, gated=False, bias=bias),
        windows=same_window(config),
        norm="layer",
        dropout=config.rate("residual_dropout"),
    )
