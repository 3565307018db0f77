"""DecoderShape: every size of a reference model, resolved from `[model]` and the facts of the data. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import Fault, SpecError
from meshwright.spec.nearest import around, divisors, listed, multiples_around
from meshwright.spec.sections import ModelSection


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes of a decoder-only transformer; nothing is left open.

    Attributes:
        name: `gpt2` or `llama`; decides which of the sizes below have a weight.
        n_layers: transformer blocks.
        d_model: width of the residual stream.
        n_heads: query heads.
        n_kv_heads: key and value heads, each shared by n_heads / n_kv_heads query heads.
        head_dim: width of one head.
        d_ff: width of the feed-forward layer.
        vocab_size: rows of the embedding and of the head.
        max_seq_len: longest sequence; gpt2 has one learned position for each place.
        dropout: probability that an activation is dropped.
        tied_embeddings: the head uses the embedding's weight.
        norm_eps: epsilon of LayerNorm or RMSNorm.
        rope_theta: base of the rotary embedding (llama).
    """

    name: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    max_seq_len: int
    dropout: float
    tied_embeddings: bool
    norm_eps: float
    rope_theta: float

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied weight counts once."""
        tables = self.vocab_size * self.d_model * (1 if self.tied_embeddings else 2)
        if self.name == "gpt2":
            return tables + self.max_seq_len * self.d_model + self.n_layers * self.block_parameters + 2 * self.d_model
        return tables + self.n_layers * self.block_parameters + self.d_model

    @property
    def block_parameters(self) -> int:
        """Parameters of one transformer block."""
        d, f, q, kv = self.d_model, self.d_ff, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = 2 * d * q + 2 * d * kv  # query and out; key and value
        if self.name == "gpt2":  # two norms with bias, and a bias for each of the six matrices
            return attention + q + 2 * kv + d + 2 * d * f + f + d + 4 * d
        return attention + 3 * d * f + 2 * d  # gate, up, down; two norms


def resolve_shape(section: ModelSection, seq_len: int, tokenizer_vocab: int | None) -> DecoderShape:
    """Fill in every size that a recipe leaves out.

    Args:
        section: `[model]` with a `name`.
        seq_len: tokens per row that the model will see.
        tokenizer_vocab: ids that the tokenizer can produce; None where the data does not say.

    Raises:
        SpecError: sizes that do not fit together; carries one fault for each.
    """
    faults = [*_head_faults(section), *_data_faults(section, seq_len, tokenizer_vocab)]
    if faults:
        raise _error(faults)
    is_gpt2 = section.name == "gpt2"
    tied = section.tied_embeddings
    return DecoderShape(
        name=section.name or "",
        n_layers=section.n_layers,
        d_model=section.d_model,
        n_heads=section.n_heads,
        n_kv_heads=section.n_kv_heads or section.n_heads,
        head_dim=section.head_dim or section.d_model // section.n_heads,
        d_ff=section.d_ff or (4 * section.d_model if is_gpt2 else _llama_d_ff(section.d_model)),
        vocab_size=section.vocab_size or tokenizer_vocab or 0,
        max_seq_len=section.max_seq_len or seq_len,
        dropout=section.dropout,
        tied_embeddings=is_gpt2 if tied is None else tied,
        norm_eps=section.norm_eps,
        rope_theta=section.rope_theta,
    )


def _llama_d_ff(d_model: int) -> int:
    """8/3 d_model, so that three matrices hold what gpt2's two do, rounded up to a multiple of 8."""
    return -(-8 * d_model // 24) * 8


def _head_faults(section: ModelSection) -> list[Fault]:
    """What is wrong with the heads, without looking at the data."""
    heads, kv_heads, width, d_model = section.n_heads, section.n_kv_heads, section.head_dim, section.d_model
    if section.name == "gpt2":
        return _gpt2_faults(section)
    faults = []
    if kv_heads and heads % kv_heads:
        nearest = f"Nearest that work: n_kv_heads = {listed(around(kv_heads, divisors(heads)))}."
        faults.append(Fault("model.n_kv_heads", f"{kv_heads} does not divide n_heads = {heads}.", nearest))
    if width is None and d_model % heads:
        faults.append(_undivided(d_model, heads, "Or name a head_dim."))
    elif (width or d_model // heads) % 2:
        odd = width or d_model // heads
        rule = f"{odd} is odd, and the rotary embedding turns pairs of numbers."
        faults.append(
            Fault("model.head_dim", rule, f"Nearest that work: head_dim = {listed(multiples_around(odd, 2))}.")
        )
    return faults


def _gpt2_faults(section: ModelSection) -> list[Fault]:
    """Keys that gpt2 has no use for, set to something that it is not."""
    heads, d_model, faults = section.n_heads, section.d_model, []
    if d_model % heads:
        return [_undivided(d_model, heads)]
    if section.n_kv_heads not in (None, heads):
        rule = f"gpt2 has one key and value head for each of its {heads} query heads, not {section.n_kv_heads} in all."
        faults.append(Fault("model.n_kv_heads", rule, 'Leave it out, or take name = "llama".'))
    if section.head_dim not in (None, d_model // heads):
        rule = f"gpt2's heads are d_model / n_heads = {d_model // heads} wide, not {section.head_dim}."
        faults.append(Fault("model.head_dim", rule, 'Leave it out, or take name = "llama".'))
    return faults


def _undivided(d_model: int, heads: int, way_out: str = "") -> Fault:
    rule = f"{heads} does not divide d_model = {d_model} ({d_model} % {heads} = {d_model % heads})."
    nearest = f"Nearest that work: n_heads = {listed(around(heads, divisors(d_model)))}. {way_out}".rstrip()
    return Fault("model.n_heads", rule, nearest)


def _data_faults(section: ModelSection, seq_len: int, tokenizer_vocab: int | None) -> list[Fault]:
    """What is wrong between the model and the data."""
    vocab, positions, faults = section.vocab_size, section.max_seq_len, []
    if vocab is None and tokenizer_vocab is None:
        rule = "it is left out, and this data has no tokenizer that would say it."
        faults.append(Fault("model.vocab_size", rule, "Set it to the largest token id plus 1."))
    elif vocab is not None and tokenizer_vocab is not None and vocab < tokenizer_vocab:
        rule = f"{vocab} rows, but the tokenizer has {tokenizer_vocab} ids."
        faults.append(Fault("model.vocab_size", rule, f"Nearest that works: {tokenizer_vocab}, or leave it out."))
    if positions is not None and positions < seq_len:
        rule = f"{positions} positions, but data.seq_len = {seq_len}."
        faults.append(
            Fault("model.max_seq_len", rule, f"Nearest that works: {seq_len}, or data.seq_len = {positions}.")
        )
    return faults


def _error(faults: list[Fault]) -> SpecError:
    """One error for all faults."""
    if len(faults) == 1:
        return SpecError(faults[0].where, faults[0].rule, faults[0].nearest)
    return SpecError("[model]", " ".join(str(fault) for fault in faults), faults=faults)
