"""Bytes per token that a decoder layer needs for a moment, beside what it keeps. Letters as in `kept`.

A maximum over the stages of a pass, of which those are written out that are the largest in some published shape:

    forward      the two branches' sums, at the end: input, residual stream, branch, sum
    backward     where the feed-forward's gradients meet; in attention that is not fused, where those of the scores do
    transient    a forward pass that keeps nothing: hidden numbers, or scores

Read off traces (tests/models/test_closed_form_against_trace.py says how near they are).
"""

from __future__ import annotations

from meshwright.cost.kept import Program, feed_forward_kept, is_plain
from meshwright.spec.decoder import DecoderLayer
from meshwright.spec.model_spec import Bytes


def forward_peak(program: Program, layer: DecoderLayer) -> Bytes:
    """The most in a forward pass, beyond what the layer keeps."""
    c, h, ff = program.c, program.h, layer.feed_forward
    copies = program.decoder.norm == "rms" and program.habits.norm != "fused" and c < 4
    sums = 4 if layer.parallel or copies else 2  # nothing keeps input and residual stream
    at_end = c * h * (sums + 2 * (layer.n_norms == 4 and c < 4))
    if is_plain(program, layer.attention):
        return _with_scores(program, layer, Bytes(residual=float(at_end)))
    if not ff.n_experts:
        return Bytes(residual=float(at_end))
    results = c * h * 2 + 2.0 * ff.top_k * h * _result_bytes(program)  # weighted, and in the tokens' order again
    return Bytes(residual=max(float(at_end), results, ff.top_k * c * ff.d_ff + 3.0 * c * h))


def _with_scores(program: Program, layer: DecoderLayer, at_end: Bytes) -> Bytes:
    """Attention by single operators: scores, a mask for all heads, copies of queries, keys and values."""
    attention, c, w = layer.attention, program.c, program.wide
    a, k, d, e, s = attention.n_heads, attention.n_kv_heads, attention.head_dim, attention.value_dim, program.seq_len
    grouped = k != a
    heads = float(c * (a * d + k * d + k * e) + w * a * d * (1 + grouped))
    if c < 4:  # all in fp32, and the probabilities come back in the compute type though nobody asks for them
        heads += w * (a * d + k * d + k * e) + c * a * s + w * a * e
        heads += c * program.h * (program.decoder.norm == "rms" and program.habits.norm != "fused")
    elif program.decoder.dropout:
        return at_end
    else:  # the scores with and without the mask, of which one is kept
        heads += w * a * s + 2.0 * w * a * d - w * a * e - c * a * e
    more = heads - _later(program, layer)
    return Bytes(fixed=float(w * s * s), inner=more) if more > at_end.per_token else at_end


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
        dropped = (1.0 if program.kernels.on_cpu else 1.0 / program.wide) if program.decoder.dropout else 0.0
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
