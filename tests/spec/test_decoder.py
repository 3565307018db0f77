"""DecoderSpec: counts of parameters and of products, by hand and as sums of their parts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import SpecError
from meshwright.spec.decoder import Attention, DecoderLayer, DecoderSpec, FeedForward


def heads(n=4, kv=2, width=8, **keys):
    return Attention(n_heads=n, n_kv_heads=kv, head_dim=width, value_dim=width, **keys)


def decoder(attention=None, branch=None, d_model=10, vocab=100, count=1, n_norms=2, parallel=False, **keys):
    layer = DecoderLayer(
        count=count,
        attention=attention or heads(),
        feed_forward=branch or FeedForward(gated=True, d_ff=16),
        n_norms=n_norms,
        parallel=parallel,
    )
    return DecoderSpec(name="x", family="llama", d_model=d_model, vocab_size=vocab, layers=(layer,), **keys)


def test_a_llama_layer_by_hand():
    model = decoder(count=3)
    attention = 10 * 32 + 2 * 10 * 16 + 32 * 10
    assert model.attention_parameters(model.layers[0]) == attention
    assert model.feed_forward_parameters(model.layers[0]) == 3 * 10 * 16
    assert model.layer_parameters(model.layers[0]) == attention + 480 + 2 * 10
    assert model.num_parameters == 2 * 1000 + 10 + 3 * (attention + 480 + 20)


def test_a_gpt2_layer_by_hand():
    attention = heads(5, 5, 2, qkv_bias=True, out_bias=True)
    model = decoder(attention, FeedForward(gated=False, d_ff=40, bias=True), norm="layer", learned_positions=7)
    assert model.layer_parameters(model.layers[0]) == 12 * 100 + 13 * 10  # the well-known 12 h^2 + 13 h
    assert replace(model, tied_embeddings=True).num_parameters == 1000 + 70 + 1330 + 20


def test_compressed_attention_by_hand():
    mla = Attention(n_heads=2, n_kv_heads=2, head_dim=5, value_dim=4, kv_rank=6, rope_dim=2, q_rank=3, qkv_bias=True)
    down = 10 * 3 + 10 * (6 + 2)
    up = 3 * 2 * 5 + 6 * 2 * (3 + 4)
    assert mla.parameters(10, 1) == down + (3 + 8) + (3 + 6) + up + 2 * 4 * 10
    assert mla.replicated(10, 1) == down + (3 + 8) + (3 + 6)  # every TP rank compresses for itself
    assert replace(mla, q_rank=0).products(10) == 10 * 8 + 10 * 2 * 5 + 84 + 80


def test_norms_inside_attention_are_one_head_wide_or_all_heads():
    assert heads(qk_norm="head").norms(1) == 2 * 8
    assert heads(qk_norm="full").norms(1) == (4 + 2) * 8
    assert heads(qk_norm="head").norms(2) == 4 * 8
    assert heads(sinks=True).parameters(10, 1) - heads().parameters(10, 1) == 4


def test_b114_a_head_is_as_wide_as_the_config_says():
    """dim 2560, 32 heads, head_dim 128: attention width 4096, not 32 * (2560 / 32)."""
    attention = heads(32, 8, 128)
    assert attention.query_width == attention.out_width == 4096
    assert attention.products(2560) == 2560 * 4096 + 2 * 2560 * 1024 + 4096 * 2560


def test_b116_flops_are_of_the_active_experts_and_memory_is_of_all():
    """8 experts, top 2: FLOPs x2, memory x8, the router apart."""
    dense, router = FeedForward(gated=True, d_ff=16), 8 * 10
    moe = replace(dense, n_experts=8, top_k=2)
    assert moe.products(10) - router == 2 * dense.products(10)
    assert moe.parameters(10) - router == 8 * dense.parameters(10)
    whole, model = decoder(branch=dense), decoder(branch=moe)
    assert model.active_parameters - whole.num_parameters == router + dense.parameters(10)
    assert model.token_matmul_parameters - whole.token_matmul_parameters == router + dense.products(10)


@pytest.mark.parametrize("tied", [True, False])
def test_b117_the_head_costs_flops_tied_or_not_and_the_lookup_none(tied):
    """V 100, h 10: 2000 FLOPs per token in both cases."""
    model = decoder(tied_embeddings=tied)
    assert 2 * model.head_matmul_parameters == 2000
    assert 2 * (model.token_matmul_parameters - model.matmul_parameters(model.layers[0])) == 2000
    assert model.embedding_parameters + model.head_parameters == (1000 if tied else 2000)


def test_shared_experts_run_for_every_token_and_their_gate_is_one_row():
    moe = FeedForward(gated=True, d_ff=16, n_experts=8, top_k=2)
    both = replace(moe, d_ff_shared=32, shared_gate=True)
    assert both.parameters(10) - moe.parameters(10) == 3 * 10 * 32 + 10
    assert both.products(10) - moe.products(10) == both.active(10) - moe.active(10) == 970
    assert both.experts(10) == moe.experts(10) == 8 * 480
    assert replace(both, shared_bias=True).parameters(10) - both.parameters(10) == 2 * 32 + 10


def test_biases_of_experts_and_router():
    plain = FeedForward(gated=True, d_ff=16, n_experts=8, top_k=2)
    biased = replace(plain, bias=True, router_bias=True)
    assert biased.parameters(10) - plain.parameters(10) == 8 * (2 * 16 + 10) + 8
    assert biased.replicated(10) == 8 * 10 + 8 + 8 * 10
    assert biased.products(10) == plain.products(10)


def test_spare_parameters_are_counted_outside_the_layers():
    assert decoder(spare_parameters=123).num_parameters - decoder().num_parameters == 123
    assert decoder(spare_parameters=123).other_parameters == 10 + 123


def test_layers_of_two_kinds_add_up():
    full, sliding = decoder(count=3).layers[0], decoder(heads(window=8), count=2).layers[0]
    model = replace(decoder(), layers=(full, sliding))
    assert model.n_layers == 5
    assert model.num_parameters == decoder(count=5).num_parameters


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: heads(6, 4), "n_kv_heads = 4: does not divide n_heads = 6. Nearest that work: n_kv_heads = 3 or 6."),
        (lambda: heads(0, 1), "n_heads = 0: must be at least 1. Nearest: 1."),
        (lambda: heads(kv_rank=4, rope_dim=8), "rope_dim = 8: is no part of head_dim = 8."),
        (lambda: FeedForward(gated=True, d_ff=0), "d_ff = 0: must be at least 1. Nearest: 1."),
        (
            lambda: FeedForward(gated=True, d_ff=4, n_experts=4, top_k=5),
            "top_k = 5: must be within 1 .. n_experts = 4. Nearest: 4.",
        ),
        (lambda: decoder(count=0), "count = 0: must be at least 1. Nearest: 1."),
        (lambda: replace(decoder(), layers=()), "layers = 0: must be at least 1. Nearest: 1."),
        (lambda: decoder(vocab=0), "vocab_size = 0: must be at least 1. Nearest: 1."),
    ],
)
def test_sizes_that_no_model_has_are_refused(wrong, message):
    with pytest.raises(SpecError) as refused:
        wrong()
    assert str(refused.value) == message


SIZE = st.integers(1, 50)


@st.composite
def decoders(draw):
    kv, width, rope = draw(SIZE), draw(SIZE), draw(SIZE)
    mla = draw(st.booleans())
    n = kv * draw(st.integers(1, 4))
    attention = Attention(
        n_heads=n,
        n_kv_heads=n if mla else kv,
        head_dim=width + rope,
        value_dim=draw(SIZE) if mla else width + rope,
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        qk_norm="none" if mla else draw(st.sampled_from(["none", "head", "full"])),
        sinks=draw(st.booleans()),
        q_rank=draw(st.integers(0, 9)) if mla else 0,
        kv_rank=draw(SIZE) if mla else 0,
        rope_dim=rope if mla else 0,
    )
    experts = draw(st.integers(0, 9))
    branch = FeedForward(
        gated=draw(st.booleans()),
        d_ff=draw(SIZE),
        bias=draw(st.booleans()),
        n_experts=experts,
        top_k=draw(st.integers(1, experts)) if experts else 0,
        d_ff_shared=draw(st.integers(0, 20)) if experts else 0,
        shared_gate=bool(experts) and draw(st.booleans()),
        router_bias=bool(experts) and draw(st.booleans()),
    )
    return decoder(
        attention,
        branch,
        d_model=draw(SIZE),
        vocab=draw(SIZE),
        count=draw(SIZE),
        n_norms=draw(st.sampled_from([1, 2, 4])),
        norm=draw(st.sampled_from(["rms", "layer"])),
        tied_embeddings=draw(st.booleans()),
        head_bias=draw(st.booleans()),
    )


@settings(max_examples=200, deadline=None)
@given(decoders())
def test_parts_never_exceed_their_whole(model):
    layer = model.layers[0]
    whole = model.layer_parameters(layer)
    assert 0 <= model.expert_parameters(layer) <= model.feed_forward_parameters(layer) < whole
    assert 0 < model.replicated_parameters(layer) < whole
    assert model.matmul_parameters(layer) < whole
    assert 0 < model.active_parameters <= model.num_parameters
    assert (model.active_parameters == model.num_parameters) == (
        layer.feed_forward.top_k == layer.feed_forward.n_experts
    )
    outside = model.embedding_parameters + model.head_parameters + model.other_parameters
    assert model.num_parameters == outside + model.n_layers * whole
