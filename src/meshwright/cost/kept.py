"""Bytes per token that the parts of a decoder layer keep from forward to backward, in closed form.

In numbers of the compute type (c bytes each) unless bytes are said; h d_model, a heads, k KV heads, d head width, e
value width, f d_ff, S sequence:

    norm          h input, h output; + 4 bytes (RMSNorm: 1/rms) or 8 (LayerNorm: mean and 1/std); see `kernels.Norm`
    attention     a d + k (d + e) + a e  queries, keys, values, result; + 4 a bytes (log-sum-exp of the fused kernel)
    feed-forward  4 f  gated: gate, its activation, up, their product;   2 f  plain: up, its activation
    experts       top_k (2 h + 4 f)  each expert's input and result, and a feed-forward between

Equal to what autograd keeps for such modules, to 0.1 % (tests/models/test_closed_form_against_trace.py). After
Korthikanti et al., arXiv 2205.05198, section 4, for kernels that they did not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from meshwright.cost.kernels import Habits, Kernels
from meshwright.spec.decoder import Attention, DecoderLayer, DecoderSpec, FeedForward
from meshwright.spec.model_spec import Bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A decoder as a program runs it.

    Attributes:
        decoder: its architecture.
        kernels: what its operators keep.
        seq_len: S.
        c: bytes of a number of the compute type.
    """

    decoder: DecoderSpec
    kernels: Kernels
    seq_len: int
    c: int

    @property
    def habits(self) -> Habits:
        """How its modules are written."""
        return self.kernels.habits_of(self.decoder)

    @property
    def h(self) -> int:
        """d_model."""
        return self.decoder.d_model

    @property
    def wide(self) -> int:
        """Bytes of a number where fp32 is the least."""
        return max(self.c, 4)

    def norm(self, width: float, count: int = 1, kind: str = "rms") -> float:
        """Bytes that norms over `width` numbers keep besides their outputs; `count` of them share those numbers."""
        statistic = self.kernels.statistic_bytes(self.c, kind)
        if kind == "layer":
            return self.c * width + 2.0 * statistic * count
        match self.habits.norm:
            case "copied":
                return (4.0 + self.c) * width + 4.0 * count
            case "wide" if self.kernels.by_family:  # transformers has fp32 there even in an fp64 model
                return 8.0 * width + 4.0 * count
            case "wide":
                return 2.0 * self.wide * width + statistic * count
            case _:
                return self.c * width + statistic * count

    def mask_bytes(self) -> float:
        """Bytes of the mask of a dropout over the residual stream; 0 without dropout."""
        return float(self.kernels.mask_bytes(self.c) * self.h) if self.decoder.dropout else 0.0

    def tables(self, layer: DecoderLayer) -> float:
        """Bytes of rotary tables (cosine and sine) or of counted positions (int64), whatever the microbatch is."""
        if self.decoder.learned_positions:
            return 8.0 * self.seq_len
        width = layer.attention.rope_dim or layer.attention.head_dim * self.habits.table_share
        return 2.0 * self.c * self.seq_len * width


def layer_kept(program: Program, layer: DecoderLayer) -> Bytes:
    """All that a layer keeps; its input counts where something keeps it, its output does not."""
    fixed = Bytes(fixed=program.tables(layer) if program.habits.wide_tables else 0.0)
    masks = Bytes(residual=2.0 * program.mask_bytes())
    parts = norms_kept(program, layer), attention_kept(program, layer.attention), feed_forward_kept(program, layer)
    return parts[0] + parts[1] + parts[2] + masks + fixed


def norms_kept(program: Program, layer: DecoderLayer) -> Bytes:
    """The norms over the residual stream. Of four, two stand behind the branches: no product keeps their outputs."""
    h, n, habits, kind = program.h, layer.n_norms, program.habits, program.decoder.norm
    shared = layer.parallel and n > 1 and (kind == "layer" or habits.norm == "fused")  # both read one tensor, kept once
    residual = program.norm(h, n, kind) if shared else n * program.norm(h, 1, kind)
    if habits.post_norms:
        return Bytes(residual=residual + 2.0 * program.c * h)
    outputs = min(n, 2) * program.c * h
    return Bytes(residual=residual, normed=outputs, fixed=4.0 * n * h if habits.offset_norm else 0.0)


def attention_kept(program: Program, attention: Attention) -> Bytes:
    """Queries, keys, values, scores and the result, with the norms inside."""
    a, k, d, e = attention.n_heads, attention.n_kv_heads, attention.head_dim, attention.value_dim
    c, habits, fixed = float(program.c), program.habits, 0.0
    groups = a if is_expanded(program, attention) else k
    heads = c * (a * d + groups * d + groups * e + a * e)
    if is_plain(program, attention):
        heads = program.wide * (a * d + a * d + a * e) + c * a * e
    if habits.joined:
        heads += c * (a + k) * d
    if habits.copied_result:
        heads += c * a * e
    if attention.qk_norm != "none":
        heads += program.norm((a + k) * d, a + k if attention.qk_norm == "head" else 2)
        fixed = 8.0 * d if habits.offset_norm else 0.0
    return Bytes(fixed=fixed, inner=heads + scores_kept(program, attention)) + _compressed(program, attention)


def _compressed(program: Program, attention: Attention) -> Bytes:
    """MLA: norms over compressed queries, keys and values, and what these are expanded to besides the values."""
    if not attention.kv_rank:
        return Bytes()
    ranks = [rank for rank in (attention.q_rank, attention.kv_rank) if rank]
    residual = sum(program.norm(rank) + program.c * rank for rank in ranks)
    return Bytes(inner=program.c * attention.n_heads * (attention.head_dim - attention.rope_dim), residual=residual)


def is_plain(program: Program, attention: Attention) -> bool:
    """Does `scaled_dot_product_attention` fall back to single operators (sdp_utils.cpp; no fused kernel fits)?"""
    kernels, grouped = program.kernels, attention.n_kv_heads != attention.n_heads
    if kernels.score_bytes or program.habits.eager:
        return False
    if kernels.on_cpu or kernels.parts:
        return program.decoder.dropout > 0
    return program.c == 8 or (program.c == 4 and grouped and not _is_masked(program, attention))


def _is_masked(program: Program, attention: Attention) -> bool:
    """Does attention get a mask in place of "causal"?"""
    return program.habits.masks and attention.window is not None and program.seq_len >= attention.window


def is_expanded(program: Program, attention: Attention) -> bool:
    """Are keys and values copied for each query head? One key head for all is broadcast."""
    repeats = program.habits.eager or _is_masked(program, attention)
    return repeats and attention.n_kv_heads > 1


def scores_kept(program: Program, attention: Attention) -> float:
    """Bytes per token that the scores leave behind."""
    a, c, s, kernels = attention.n_heads, program.c, program.seq_len, program.kernels
    if kernels.score_bytes:
        return kernels.score_bytes * a * min(s, attention.window or s)
    if program.habits.eager and attention.sinks:  # a softmax over one more column, and where each row was largest
        return a * (c * (s + 1) + 8.0)
    if program.habits.eager:  # an fp32 softmax and its copy in the compute type; a tanh before it
        return a * s * (4.0 + c * (c != 4) + c * program.decoder.softcap)
    if is_plain(program, attention):
        mask = program.wide if kernels.on_cpu or kernels.parts else 1
        dropped = program.wide + mask if program.decoder.dropout else 0
        return float(a * s * (program.wide + dropped))
    is_efficient = not kernels.on_cpu and (c == 4 or attention.head_dim != attention.value_dim)
    masked = _is_masked(program, attention)
    rows = 32 * -(-s // 32) / s if is_efficient or masked else 1.0  # its log-sum-exp is padded to 32 rows
    return program.wide * a * rows + (c * s if masked else 0.0)


def feed_forward_kept(program: Program, layer: DecoderLayer) -> Bytes:
    """Hidden numbers; with experts the router, each expert's input and result, and the shared expert."""
    ff, h, c = layer.feed_forward, program.h, program.c
    parts = program.kernels.activation_parts if ff.gated else program.habits.plain_parts
    if not ff.n_experts:
        return Bytes(inner=parts * c * ff.d_ff)
    expert_parts = program.habits.expert_parts if program.kernels.by_family else parts
    routed = ff.top_k * program.kernels.capacity * c * (2 * h + expert_parts * ff.d_ff)
    shared = parts * c * ff.d_ff_shared + ff.shared_gate * c * (h + 1)
    return Bytes(inner=routed + shared) + _router_kept(program, ff)


def _router_kept(program: Program, ff: FeedForward) -> Bytes:
    """Probabilities, weights, and four tables of int64 for each choice, which sort tokens by expert and back."""
    wide = program.habits.wide_router
    choices = ff.top_k * (32.0 + (8.0 if wide else program.c)) + 4.0 * wide
    probabilities = 0.0 if program.habits.eager else 4.0 * ff.n_experts
    copies = 4.0 * program.h if wide else 0.0
    return Bytes(fixed=4.0 * ff.n_experts * program.h if wide else 0.0, residual=probabilities + choices + copies)


def selective_kept(program: Program, layer: DecoderLayer) -> Bytes:
    """What selective recompute keeps: a layer's input and the results of its products.

    Transformers runs experts in one grouped product, which parallel/recompute.py does not keep.
    """
    attention, ff, c, h = layer.attention, layer.feed_forward, program.c, program.h
    results = float(projections(attention))
    routed = 0 if program.kernels.by_family else ff.top_k * ff.d_ff
    width = routed + ff.d_ff_shared if ff.n_experts else ff.d_ff
    results += (2 if ff.gated else 1) * width + ff.shared_gate
    router = (4.0 if program.habits.wide_router else c) * ff.n_experts
    kept = c * results + _attention_result(program, attention)
    fixed = program.tables(layer) if program.habits.wide_tables else 0.0
    into_stream = c * h * (1.0 + (width > 0))  # under tp a rank's addends are as wide as the stream
    return Bytes(fixed=fixed, residual=c * h + router, inner=kept, normed=into_stream)


def projections(attention: Attention) -> int:
    """Numbers that the products in front of the scores give."""
    a, k, d, e = attention.n_heads, attention.n_kv_heads, attention.head_dim, attention.value_dim
    if not attention.kv_rank:
        return a * d + k * (d + e)
    expanded = a * (d - attention.rope_dim + e)
    return a * d + attention.q_rank + attention.kv_rank + attention.rope_dim + expanded


def _attention_result(program: Program, attention: Attention) -> float:
    """Bytes that selective recompute keeps of attention: not what draws random numbers, nor scores that outgrow it."""
    a, d, e, s = attention.n_heads, attention.head_dim, attention.value_dim, program.seq_len
    if program.habits.eager or is_plain(program, attention):
        size = program.c if program.habits.eager else program.wide
        return float(size * a * (e + (s if s <= 2 * d else 0)))
    if program.decoder.dropout:
        return 0.0
    masked = _is_masked(program, attention)
    scores = scores_kept(program, attention) - (program.c * s if masked else 0.0)
    return program.c * a * e + scores
