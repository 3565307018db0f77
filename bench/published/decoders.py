"""Row -> DecoderSpec: the architecture that a published run trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from meshwright.spec.decoder import Attention, DecoderLayer, DecoderSpec, FeedForward
from published.rows import Row

GPT2_VOCABULARY: Final = 50257
DROPOUT: Final = 0.1
"""Megatron-LM's default, of attention and of both branches; none of the sources says otherwise."""


def decoder_of(row: Row) -> DecoderSpec:
    """The decoder of a row; what the source leaves out follows the family's public configuration."""
    return llama(row) if row.model.startswith(("Llama", "InternLM")) else gpt(row)


def llama(row: Row) -> DecoderSpec:
    """RMSNorm, rotary positions, gated feed-forward, no biases. Llama 3.2 ties embedding and head."""
    return _decoder(row, gated=True, bias=False, vocab_size=row.vocab_size or 0, tied=row.model.startswith("Llama 3.2"))


def gpt(row: Row) -> DecoderSpec:
    """LayerNorm, biases, GELU, dropout; Megatron-LM pads the vocabulary to a multiple of 128 tp."""
    multiple = 128 * (row.tp or 1)
    vocab_size = -(-(row.vocab_size or GPT2_VOCABULARY) // multiple) * multiple
    gated, bias, tied = row.says("SwiGLU"), not row.says("no linear bias"), not row.says("untied output")
    found = _decoder(row, gated=gated, bias=bias, vocab_size=vocab_size, tied=tied)
    positions = 0 if row.says("rotary") else row.seq_len or 0
    return replace(found, norm="layer", dropout=DROPOUT, learned_positions=positions)


def _decoder(row: Row, *, gated: bool, bias: bool, vocab_size: int, tied: bool) -> DecoderSpec:
    d_model, heads = row.d_model or 0, row.n_heads or (row.d_model or 0) // 128
    layer = DecoderLayer(
        count=row.n_layers or 0,
        attention=Attention(
            n_heads=heads,
            n_kv_heads=row.n_kv_heads or heads,
            head_dim=d_model // heads,
            value_dim=d_model // heads,
            qkv_bias=bias,
            out_bias=bias,
        ),
        feed_forward=FeedForward(
            gated=gated, d_ff=row.d_ff or 0, bias=bias, n_experts=row.n_experts or 0, top_k=row.top_k or 0
        ),
    )
    return DecoderSpec(
        name=row.model,
        family="published",
        d_model=d_model,
        vocab_size=vocab_size,
        layers=(layer,),
        tied_embeddings=tied,
    )
