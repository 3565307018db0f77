"""Bytes per token that a decoder layer needs for a moment, beside what it keeps. Letters as in `kept`.

A maximum over the stages of a pass, of which those are written out that are the largest in some published shape:

    forward      the two branches' sums, at the end: input, residual stream, branch, sum
    backward     where the feed-forward's gradients meet; in attention that is not fused, where those of the scores do
    transient    a forward pass that keeps nothing: hidden numbers, or scores
    parted       a backward pass of inputs alone, which frees nothing: gradients of products and norms, and scores
    draw         where tp draws the dropout mask of all heads, of which a rank keeps its own heads' part

Read off traces (tests/models/test_closed_form_against_trace.py says how near they are).
"""

from __future__ import annotations

from meshwright.cost.kept import Program, feed_forward_kept, is_plain, layer_kept, projections, selective_kept
from meshwright.spec.decoder import DecoderLayer
from meshwright.spec.model_spec import Bytes


def forward_peak(program: Program, layer: DecoderLayer) -> Bytes:
    """The most in a forward pass, beyond what the layer keeps."""
    c, h, ff = program.c, program.h, layer.feed_forward
    copies = program.decoder.norm == "rms" and program.habits.norm != "fused" and c < 4
    sums = 4 if layer.parallel or copies else 2  # nothing keeps input and residual stream
    at_end = c * h * (sums + 2 * (layer.n_norms == 4 and c < 4))
    if is_plain(program, layer.attention):
        scores = _scores_forward(program, layer)
        return scores if scores is not None and scores.per_token > at_end else Bytes(residual=float(at_end))
    if not ff.n_experts:
        return Bytes(residual=float(at_end))
    results = c * h * 2 + 2.0 * ff.top_k * h * _result_bytes(program)  # weighted, and in the tokens' order again
    return Bytes(residual=max(float(at_end), results, ff.top_k * c * ff.d_ff + 3.0 * c * h))


def _scores_forward(program: Program, layer: DecoderLayer) -> Bytes | None:
    """Attention by single operators: scores, a mask for all heads, copies of queries, keys and values.

    None where that is not much.
    """
    attention, c, w = layer.attention, program.c, program.wide
    a, k, d, e, s = attention.n_heads, attention.n_kv_heads, attention.head_dim, attention.value_dim, program.seq_len
    grouped = k != a
    heads = float(c * (a * d + k * d + k * e) + w * a * d * (1 + grouped))
    if c < 4:  # all in fp32, and the probabilities come back in the compute type though nobody asks for them
        heads += w * (a * d + k * d + k * e) + c * a * s + w * a * e
        heads += c * program.h * (program.decoder.norm == "rms" and program.habits.norm != "fused")
    elif program.decoder.dropout:
        return None
    else:  # the scores with and without the mask, of which one is kept
        heads += w * a * s + 2.0 * w * a * d - w * a * e - c * a * e
    return Bytes(fixed=float(w * s * s), inner=heads - _later(program, layer))


def recomputed_peak(program: Program, layer: DecoderLayer, mode: str) -> Bytes:
    """The most in a backward pass that computes the layer again, beyond what it keeps in this mode.

    It is in the pass itself, or before it: where attention is not fused and its scores are made again. Selective
    recompute has the results of the products behind them still.
    """
    whole, c, ff = layer_kept(program, layer), program.c, layer.feed_forward
    kept = selective_kept(program, layer) if mode == "selective" else Bytes(residual=c * program.h)
    scores = _scores_forward(program, layer) if is_plain(program, layer.attention) else None
    behind = c * ((2.0 if ff.gated else 1.0) * ff.d_ff + 2.0 * program.h) if mode == "selective" else 0.0
    backward = backward_peak(program, layer)
    if scores is not None and scores.per_token + behind > backward.per_token:
        return whole - kept + scores + Bytes(inner=behind)
    return whole - kept + backward


def _later(program: Program, layer: DecoderLayer) -> float:
    """Bytes that a layer keeps of what stands behind the attention's own result."""
    c, h = program.c, program.h
    behind = feed_forward_kept(program, layer).per_token + program.norm(h, 1, program.decoder.norm) + c * h
    return behind + 2.0 * program.mask_bytes()


def _result_bytes(program: Program) -> float:
    """Bytes of a number of an expert's result, once it is weighted."""
    return 4.0 if program.habits.wide_router else float(program.c)


def transient(program: Program, layer: DecoderLayer) -> Bytes:
    """The most in a forward pass that keeps nothing, the input apart."""
    attention, c, h = layer.attention, program.c, program.h
    stream = Bytes(residual=c * h, normed=c * h)
    stages = [_hidden_forward(program, layer)]
    a, d, e, s = attention.n_heads, attention.head_dim, attention.value_dim, program.seq_len
    if attention.kv_rank:
        stages.append(float(c * a * (4 * d + 2 * e)))
    if program.habits.eager:
        stages.append(a * s * (3.0 * c if attention.sinks else 8.0 + 2.0 * c * (c < 4)))
    elif is_plain(program, attention):
        is_wide = program.kernels.on_cpu or program.kernels.parts
        dropped = (1.0 if is_wide else 1.0 / program.wide) if program.decoder.dropout else 0.0
        scores = program.wide * a * (s * (2.0 + dropped) + 4 * d)
        if scores > max(stages):  # with a mask for all heads
            return stream + Bytes(fixed=float(program.wide * s * s), inner=scores)
    return stream + Bytes(inner=max(stages))


def _hidden_forward(program: Program, layer: DecoderLayer) -> float:
    ff, c, h = layer.feed_forward, program.c, program.h
    if ff.n_experts:
        written_out = 4.0 * c * ff.d_ff + c * h
        results = 2.0 * c * h + 2.0 * h * _result_bytes(program)
        return ff.top_k * max(written_out, results)
    if not ff.gated:
        return c * ff.d_ff * (2.0 if program.habits.plain_parts == 2 else 4.0)
    return c * ff.d_ff * (4.0 if program.habits.joined else 3.0)


def backward_peak(program: Program, layer: DecoderLayer) -> Bytes:
    """The most in a backward pass, beyond what the layer keeps and the gradients of its parameters."""
    stages = [_hidden_backward(program, layer)]
    if is_plain(program, layer.attention) or program.habits.eager:
        stages.append(_scores_backward(program, layer))
    stream = float(program.c * program.h)
    return Bytes(residual=stream, inner=max(max(stages) - stream, 0.0))


def _hidden_backward(program: Program, layer: DecoderLayer) -> float:
    """Gradients of the stream and of the hidden numbers, less what has been freed by then."""
    ff, c, h = layer.feed_forward, program.c, program.h
    if ff.n_experts:
        results = h * (3.0 * c + (8.0 if program.habits.wide_router else 0.0))
        return c * h + ff.top_k * max(2.0 * c * ff.d_ff, results)
    is_dropped = program.decoder.dropout > 0
    at_down = c * (h * (1 + is_dropped) + ff.d_ff)  # dropout's gradient is a new tensor
    at_activation = c * (h + ff.d_ff * (2 if ff.gated or program.habits.plain_parts > 2 else 1))
    freed = program.mask_bytes() + (program.norm(h) if layer.n_norms == 4 else 0.0)
    at_norm = c * h + 16.0 * h if layer.n_norms == 4 else 0.0  # the last norm, by single operators in fp32
    return max(max(at_down, at_activation) - freed, at_norm)


def _scores_backward(program: Program, layer: DecoderLayer) -> float:
    """Gradients of the scores, less the feed-forward and what stands behind the scores, which are over by then."""
    attention, c, h = layer.attention, program.c, program.h
    a, e, s = attention.n_heads, attention.value_dim, program.seq_len
    later = _later(program, layer) + c * a * e
    if program.habits.eager:
        return c * h + a * s * (c if attention.sinks else 8.0) + c * a * e - later
    if program.decoder.dropout:
        return c * h + program.wide * a * (s + 2 * e) - later
    return c * h + program.wide * a * (2 * s + e) - later - program.wide * a * e


def parted_kept(program: Program, layer: DecoderLayer) -> Bytes:
    """From the backward pass of inputs to that of weights: the gradients of what products and norms gave."""
    attention, stream = layer.attention, program.c * program.h
    norms = layer.n_norms * _norm_gradient(program, program.h) + stream * (layer.n_norms == 4)
    ff = layer.feed_forward
    width = ff.top_k * ff.d_ff + ff.d_ff_shared if ff.n_experts else ff.d_ff
    products = program.c * (projections(attention) + (2.0 if ff.gated else 1.0) * width)
    heads = attention.n_heads * attention.head_dim + attention.n_kv_heads * attention.head_dim
    inner = products + _norm_gradient(program, heads) * (attention.qk_norm != "none")
    return Bytes(inner=inner, residual=norms, normed=2.0 * stream)


def _norm_gradient(program: Program, width: int) -> float:
    """Bytes of the gradient of a norm's result, as its weight sees it."""
    is_wide = program.decoder.norm == "rms" and program.habits.norm == "wide"
    return float((program.wide if is_wide else program.c) * width)


def parted_peak(program: Program, layer: DecoderLayer) -> Bytes:
    """The most in a backward pass of inputs, beyond what the layer keeps.

    At its end, where the gradients of all that reads one norm meet (or in that norm, of single operators in fp32); in
    the feed-forward's activation; or at the scores.
    """
    kept, c, h, attention = parted_kept(program, layer), program.c, program.h, layer.attention
    stream, ff, heads = float(c * h), layer.feed_forward, attention.n_heads * attention.head_dim
    is_single = program.decoder.norm == "rms" and program.habits.norm != "fused"
    is_joined, drops = program.habits.joined or program.decoder.norm == "layer", program.decoder.dropout > 0
    found = [kept + Bytes(residual=(2.0 + drops * (2.0 if is_joined else 3.0)) * stream)]
    if is_single:
        found.append(kept + Bytes(residual=2.0 * stream + 16.0 * h if c < 4 else 5.0 * stream))
    if is_single and c < 4 and attention.qk_norm != "none":
        found.append(kept + Bytes(inner=16.0 * heads, residual=stream))
    if not ff.n_experts:
        parts = 4.0 if ff.gated else program.habits.plain_parts + 1.0
        found.append(Bytes(inner=parts * c * ff.d_ff, residual=2.0 * stream))
    else:
        found.append(Bytes(inner=ff.top_k * c * (4.0 * ff.d_ff + 2.0 * h), residual=2.0 * stream))
    if is_plain(program, attention):
        a, e, s = attention.n_heads, attention.value_dim, program.seq_len
        scores = program.wide * a * (2.0 * s + 2.0 * e * drops) - c * projections(attention)  # those come after
        found.append(kept + Bytes(inner=scores, residual=stream - _norm_gradient(program, h)))
    return max(found, key=lambda form: form.per_token)


def draw(program: Program, layer: DecoderLayer) -> Bytes | None:
    """Where the mask of all heads is drawn, beyond what the layer keeps once it is through.

    The scores' softmax is there and this rank's part of the mask; what comes after, and the product of both, is not.
    """
    if not is_plain(program, layer.attention) or not program.decoder.dropout:
        return None
    attention, c = layer.attention, program.c
    a, k, d, e = attention.n_heads, attention.n_kv_heads, attention.head_dim, attention.value_dim
    places = a * program.seq_len
    # On GPUs torch's own dropout is asked for it: its input, its result, and its mask of a byte each.
    whole = places * (program.wide if program.kernels.on_cpu else 2.0 * program.wide + 1.0)
    later = _later(program, layer) + c * a * e + program.wide * places
    narrow = c * (a * d + k * d + k * e) if c < 4 else 0  # what has been copied to fp32
    return Bytes(normed=float(whole), inner=float(narrow - later))
