"""DecoderSpec -> ModelSpec: what a decoder's passes keep and need, in closed form (see `kept` for the parts).

Equal to what a trace of such modules finds (tests/models/test_closed_form_against_trace.py), without running anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from meshwright.cost.kept import Program, layer_kept, selective_kept
from meshwright.cost.kernels import KERNELS, Kernels
from meshwright.cost.working import (
    backward_peak,
    draw,
    forward_peak,
    parted_kept,
    parted_peak,
    recomputed_peak,
    transient,
)
from meshwright.errors import SpecError
from meshwright.spec.decoder import DecoderLayer, DecoderSpec
from meshwright.spec.model_spec import Bytes, ModelSpec, UnitSpec

COMPUTE_BYTES: Final[Mapping[str, int]] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def model_spec(decoder: DecoderSpec, *, seq_len: int, compute: str, kernels: Kernels = KERNELS["cuda"]) -> ModelSpec:
    """Describe a decoder for the cost room.

    Args:
        decoder: its architecture.
        seq_len: tokens per sample.
        compute: fp32 | bf16 | fp16 | fp64.
        kernels: what its operators keep.

    Raises:
        SpecError: no such compute type.
    """
    if compute not in COMPUTE_BYTES:
        raise SpecError(f"precision.compute = {compute}", "is no compute type.", "There are fp32, bf16, fp16 and fp64.")
    program = Program(decoder=decoder, kernels=kernels, seq_len=seq_len, c=COMPUTE_BYTES[compute])
    h, v = decoder.d_model, decoder.vocab_size
    wide = 2.0 if compute == "fp64" else 1.0  # the loss is summed in fp32, or in fp64
    first = decoder.layers[0].attention
    return ModelSpec(
        name=decoder.name,
        units=tuple(_unit(program, layer) for layer in decoder.layers),
        embedding_parameters=decoder.embedding_parameters,
        head_parameters=decoder.head_parameters,
        other_parameters=decoder.other_parameters,
        tied=decoder.tied_embeddings,
        before=_before(program),
        after=_after(program),
        loss_kept=Bytes(inner=wide * kernels.loss_kept_bytes * v),
        loss_forward=Bytes(inner=wide * kernels.loss_forward_bytes * v),
        loss_peak=Bytes(inner=wide * kernels.loss_peak_bytes * v),
        d_model=h,
        vocab_size=v,
        n_heads=first.n_heads,
        n_kv_heads=first.n_kv_heads,
        n_experts=max(layer.feed_forward.n_experts for layer in decoder.layers),
        max_seq_len=decoder.max_seq_len,
        seq_len=seq_len,
        compute=compute,
        source=f"closed form, {kernels.name} kernels",
        confidence=decoder.confidence,
        architecture=_facts(decoder),
    )


def _facts(decoder: DecoderSpec) -> dict[str, int | float | str | bool | None]:
    attention, ff = decoder.layers[-1].attention, decoder.layers[-1].feed_forward
    return {
        "family": decoder.family,
        "head_dim": attention.head_dim,
        "d_ff": ff.d_ff,
        "gated": ff.gated,
        "top_k": ff.top_k,
        "dropout": decoder.dropout,
        "tied_embeddings": decoder.tied_embeddings,
        "active_parameters": decoder.active_parameters,
    }


def _before(program: Program) -> Bytes:
    """Ids and labels (int64), rotary tables or positions, and the dropout behind the embedding."""
    decoder = program.decoder
    kinds = {layer.attention.window is None for layer in decoder.layers} if decoder.family == "gemma3_text" else {True}
    tables = 0.0 if program.habits.wide_tables else len(kinds) * program.tables(decoder.layers[0])
    dropped = program.mask_bytes() if decoder.learned_positions else 0.0
    return Bytes(fixed=tables, residual=16.0 + dropped)


def _after(program: Program) -> Bytes:
    """The final norm, and logits that pass a tanh."""
    c, h = program.c, program.h
    capped = Bytes(inner=float(c * program.decoder.vocab_size * program.decoder.softcap))
    if not program.decoder.final_norm:
        return capped + Bytes(residual=c * h)
    offset = 4.0 * h if program.habits.offset_norm else 0.0
    return capped + Bytes(fixed=offset, residual=program.norm(h, 1, program.decoder.norm), normed=c * h)


def _unit(program: Program, layer: DecoderLayer) -> UnitSpec:
    """One run of equal layers."""
    decoder, attention, ff = program.decoder, layer.attention, layer.feed_forward
    h, kernels = program.h, program.kernels
    differs = decoder.dropout > 0 and kernels.name in ("cuda", "hf") and not kernels.parts
    full = Bytes(fixed=program.tables(layer) if program.habits.wide_tables else 0.0, residual=program.c * h)
    return UnitSpec(
        name="layer",
        count=layer.count,
        parameters=decoder.layer_parameters(layer),
        expert=decoder.expert_parameters(layer),
        replicated=decoder.replicated_parameters(layer),
        largest=max(h * ff.d_ff, h * attention.n_heads * attention.head_dim),
        saved={"none": layer_kept(program, layer), "selective": selective_kept(program, layer), "full": full},
        forward_peak=forward_peak(program, layer),
        transient=transient(program, layer),
        backward_peak=backward_peak(program, layer),
        recomputed_peak={mode: recomputed_peak(program, layer, mode) for mode in ("selective", "full")},
        parted_kept=parted_kept(program, layer),
        parted_peak=parted_peak(program, layer),
        draw=draw(program, layer),
        under_tp=_unit(replace(program, kernels=replace(kernels, parts=True)), layer) if differs else None,
        matmul_parameters=decoder.matmul_parameters(layer),
        attention_width=attention.n_heads * (attention.head_dim + attention.value_dim) // 2,
    )


__all__ = ["COMPUTE_BYTES", "KERNELS", "Kernels", "model_spec"]
