"""What the families of config.json have in common: heads, widths, windows, and runs of equal layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from meshwright.errors import SpecError
from meshwright.spec.decoder import Attention, DecoderLayer, DecoderSpec, FeedForward
from meshwright.spec.family_config import FamilyConfig
from meshwright.spec.nearest import around, closest, divisors, listed, shown

Windows = Sequence[int | None]
"""How far each layer looks back."""


def head_dim(config: FamilyConfig) -> int:
    """Width of a head: as the file has it, else hidden_size / num_attention_heads.

    Raises:
        SpecError: the file does not say it, and the heads do not divide the width.
    """
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    given = config.size_or_none("head_dim")
    if given is None and width % heads:
        rule = f"{heads} does not divide {config.spelling('hidden_size')} = {width}."
        way_out = " Or give head_dim." if "head_dim" in config.values else ""
        near = f"Nearest that work: {listed(around(heads, divisors(width)))}.{way_out}"
        raise SpecError(config.where("num_attention_heads"), rule, near)
    return given or width // heads


def attention(
    config: FamilyConfig, *, qkv_bias: bool = False, out_bias: bool = False, kv_heads: int | None = None
) -> Attention:
    """Grouped-query attention.

    Args:
        config: the file.
        qkv_bias: the query, key and value products have biases.
        out_bias: the output product has one.
        kv_heads: key and value heads; None for what the file says, which is num_attention_heads where it says null.

    Raises:
        SpecError: the heads do not fit together.
    """
    heads, width = config.size("num_attention_heads"), head_dim(config)
    groups = kv_heads or config.size_or_none("num_key_value_heads") or heads
    if heads % groups:
        rule = f"{groups} does not divide {config.spelling('num_attention_heads')} = {heads}."
        near = f"Nearest that work: {listed(around(groups, divisors(heads)))}."
        raise SpecError(config.where("num_key_value_heads"), rule, near)
    return Attention(
        n_heads=heads, n_kv_heads=groups, head_dim=width, value_dim=width, qkv_bias=qkv_bias, out_bias=out_bias
    )


def dense(config: FamilyConfig, *, gated: bool = True, bias: bool = False) -> FeedForward:
    """A feed-forward without experts; its width is four times the model's where the file does not say it."""
    width = config.size_or_none("intermediate_size") or 4 * config.size("hidden_size")
    return FeedForward(gated=gated, d_ff=width, bias=bias)


def same_window(config: FamilyConfig) -> Windows:
    """The same window in every layer."""
    return [config.size_or_none("sliding_window") or None] * config.size("num_hidden_layers")


def chosen_windows(config: FamilyConfig, slides: Sequence[bool]) -> Windows:
    """The window in some layers.

    Args:
        config: the file; its `layer_types`, where it has them, say which.
        slides: which layers look back only as far as the window where the file does not say it.

    Raises:
        SpecError: `layer_types` has another length or holds other words.
    """
    window, kinds = config.size_or_none("sliding_window") or None, config.entries("layer_types")
    if kinds is not None:
        slides = [_slides(config, kind) for kind in _one_a_layer(config, "layer_types", kinds)]
    return [window if slide else None for slide in slides]


def _one_a_layer(config: FamilyConfig, key: str, entries: list[Any]) -> list[Any]:
    wanted = config.size("num_hidden_layers")
    if len(entries) != wanted:
        rule = f"has {len(entries)} entries for {wanted} layers."
        raise SpecError(config.where(key), rule, "It needs one for each layer; or leave it out.")
    return entries


def _slides(config: FamilyConfig, kind: object) -> bool:
    known = ("sliding_attention", "full_attention")
    if kind == "attention":  # an older word of transformers
        return False
    if kind not in known:
        near = closest(str(kind), known, 0.5)
        rule = f"{shown(kind)} is not one of {', '.join(known)}."
        raise SpecError(config.where("layer_types"), rule, f'Nearest: "{near}".' if near else "")
    return kind == known[0]


def decoder(
    config: FamilyConfig,
    heads: Attention,
    feed_forward: FeedForward | Sequence[FeedForward],
    *,
    windows: Windows = (),
    n_norms: int = 2,
    parallel: bool = False,
    norm: Literal["rms", "layer"] = "rms",
    learned_positions: int = 0,
    head_bias: bool = False,
    dropout: float = 0.0,
    softcap: bool = False,
) -> DecoderSpec:
    """Put the parts together: layers of one kind become one run, in the order in which the kinds appear.

    Args:
        config: the file.
        heads: attention of every layer, its window apart.
        feed_forward: of every layer, or one for each.
        windows: one for each layer; none for no window anywhere.
        n_norms: of a layer.
        parallel: attention and feed-forward read the same input.
        norm: kind of all norms.
        learned_positions: rows of the table of positions.
        head_bias: the head has a bias.
        dropout: of the residual stream.
        softcap: logits or scores pass a tanh.
    """
    count = config.size("num_hidden_layers")
    branches = [feed_forward] * count if isinstance(feed_forward, FeedForward) else feed_forward
    kinds = Counter(zip(windows or [None] * count, branches, strict=True))
    return DecoderSpec(
        name=config.name,
        family=config.family,
        d_model=config.size("hidden_size"),
        vocab_size=config.size("vocab_size"),
        layers=tuple(
            DecoderLayer(
                count=repeats,
                attention=replace(heads, window=window),
                feed_forward=branch,
                n_norms=n_norms,
                parallel=parallel,
            )
            for (window, branch), repeats in kinds.items()
        ),
        norm=norm,
        tied_embeddings=config.flag("tie_word_embeddings"),
        max_seq_len=config.size("max_position_embeddings"),
        learned_positions=learned_positions,
        head_bias=head_bias,
        dropout=dropout,
        softcap=softcap,
    )
