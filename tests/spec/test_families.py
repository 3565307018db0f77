"""config.json -> DecoderSpec: what each family does its own way, what a file may leave out, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import CatalogError, SpecError
from meshwright.spec.families import FAMILIES, read_decoder
from meshwright.spec.family_defaults import DEFAULTS, SPELLINGS
from spec.sound_configs import sound_config

SMALL = dict(
    vocab_size=100, hidden_size=12, intermediate_size=20, num_hidden_layers=6, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2,
)  # fmt: skip


def read(family, **keys):
    return read_decoder({"model_type": family} | SMALL | keys, "m")


def kinds(spec):
    """Of each run: layers, window, experts."""
    return [(layer.count, layer.attention.window, layer.feed_forward.n_experts) for layer in spec.layers]


def test_every_family_has_a_reader_and_its_defaults():
    assert set(FAMILIES) == set(DEFAULTS) >= set(SPELLINGS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_with_nothing_but_its_family_is_the_default_of_transformers(family):
    passed = {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}
    spec = read_decoder({"model_type": family, **passed}, "m")
    assert (spec.name, spec.family, spec.confidence) == ("m", family, "exact")
    assert spec.source == f"config.json, {family}"
    assert spec.n_layers == DEFAULTS[family]["num_hidden_layers"]
    assert 1e8 < spec.active_parameters <= spec.num_parameters


def test_head_dim_is_read_and_else_derived():
    assert read("llama").layers[0].attention.query_width == 32
    assert read("llama", head_dim=None).layers[0].attention.head_dim == 3
    assert read_decoder({"model_type": "qwen3"}, "m").layers[0].attention.head_dim == 128
    assert read("gpt_neox").layers[0].attention.head_dim == 3  # this family has no such key


def test_key_value_heads_are_as_many_as_heads_where_the_file_says_null():
    def groups(family, **keys):
        return read_decoder({"model_type": family, **keys}, "m").layers[0].attention.n_kv_heads

    assert (groups("llama"), groups("mistral"), groups("mistral", num_key_value_heads=None)) == (32, 8, 32)


def test_switches_of_the_dense_families():
    assert not read("llama").tied_embeddings and read("gemma").tied_embeddings
    biased = read("llama", attention_bias=True, mlp_bias=True).layers[0]
    assert biased.attention.qkv_bias and biased.attention.out_bias and biased.feed_forward.bias
    qwen2 = read("qwen2").layers[0].attention
    assert (qwen2.qkv_bias, qwen2.out_bias) == (True, False)
    assert read("qwen3").layers[0].attention.qk_norm == read("gemma3_text").layers[0].attention.qk_norm == "head"
    assert read("olmo2").layers[0].attention.qk_norm == "full"
    assert read("gemma2").layers[0].n_norms == 4 and read("gemma2").softcap and not read("gemma3_text").softcap
    assert not read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None).softcap
    assert read("phi").head_bias and read("phi").layers[0].n_norms == 1 and read("phi").layers[0].parallel
    assert read("gpt_neox").layers[0].parallel and not read("gpt_neox", use_parallel_residual=False).layers[0].parallel
    assert read("gpt2", n_embd=12, n_head=4, n_positions=64).learned_positions == 64
    assert read("starcoder2").norm == "layer" and not read("starcoder2").layers[0].feed_forward.gated
    assert read("phi3", resid_pdrop=0.25).dropout == 0.25 and read("gpt2").dropout == 0.1


def test_falcon_has_one_key_head_or_a_few_or_all():
    def falcon(**keys):
        layer = read("falcon", **keys).layers[0]
        return layer.attention.n_kv_heads, layer.n_norms, layer.parallel

    assert falcon() == (1, 1, True)
    assert falcon(multi_query=False, parallel_attn=False) == (4, 2, False)
    assert falcon(new_decoder_architecture=True, num_kv_heads=2) == (2, 2, True)
    assert falcon(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1) == (2, 1, True)


@pytest.mark.parametrize(
    ("family", "keys", "wanted"),
    [
        ("mistral", {}, [(6, 4096, 0)]),
        ("mistral", {"sliding_window": None}, [(6, None, 0)]),
        ("mixtral", {"sliding_window": 8}, [(6, 8, 8)]),
        ("qwen2", {}, [(6, None, 0)]),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 4}, [(4, None, 0), (2, 4096, 0)]),
        ("gemma2", {}, [(3, 4096, 0), (3, None, 0)]),
        ("gemma2", {"layer_types": ["full_attention"] * 6}, [(6, None, 0)]),
        ("gemma3_text", {}, [(5, 4096, 0), (1, None, 0)]),
        ("gemma3_text", {"sliding_window_pattern": 3}, [(4, 4096, 0), (2, None, 0)]),
        ("gpt_oss", {}, [(3, 128, 128), (3, None, 128)]),
        ("smollm3", {"sliding_window": 8, "use_sliding_window": True}, [(5, None, 0), (1, 8, 0)]),
        ("smollm3", {"sliding_window": 8}, [(6, None, 0)]),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 3}, [(2, 4096, 60), (4, None, 60)]),
        ("qwen3_moe", {"decoder_sparse_step": 2}, [(3, None, 0), (3, None, 128)]),
        ("qwen3_moe", {"mlp_only_layers": [0, 5]}, [(2, None, 0), (4, None, 128)]),
        ("qwen3_moe", {"use_sliding_window": True}, [(6, 4096, 128)]),
        ("deepseek_v3", {}, [(3, None, 0), (3, None, 256)]),
        ("deepseek_v3", {"first_k_dense_replace": 9}, [(6, None, 0)]),
    ],
)
def test_layers_of_one_kind_are_one_run(family, keys, wanted):
    assert kinds(read(family, **keys)) == wanted


def test_compressed_keys_of_deepseek():
    lite = read("deepseek_v2", num_experts_per_tok=6, q_lora_rank=None).layers[0]
    assert (lite.attention.q_rank, lite.attention.kv_rank, lite.attention.head_dim) == (0, 512, 192)
    assert lite.attention.n_kv_heads == 4 and lite.feed_forward.d_ff_shared == 2 * 1407
    alone = read("deepseek_v3", n_shared_experts=None).layers[-1].feed_forward
    assert (alone.d_ff_shared, alone.top_k) == (0, 8)


def test_experts_under_their_other_name():
    assert read("qwen3_moe", num_local_experts=16).layers[0].feed_forward.n_experts == 16
    assert read("gpt_oss", num_experts=16).layers[0].feed_forward.n_experts == 16


def test_the_language_model_of_several_parts_is_read_and_the_rest_is_said_to_be_uncounted():
    text = SMALL | {"model_type": "gemma3_text"}
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    spec = read_decoder(whole, "m")
    assert spec.num_parameters == read_decoder(text, "m").num_parameters
    assert spec.source == "the language model of config.json, gemma3; its other parts are not counted"
    untied = read_decoder({"model_type": "llava", "tie_word_embeddings": False, "text_config": text}, "m")
    assert not untied.tied_embeddings
    assert read_decoder({"model_type": "gemma3", "text_config": SMALL}, "m").family == "gemma3_text"
    with pytest.raises(CatalogError, match='model_type = "llava": is no family known here'):
        read_decoder({"model_type": "llava", "text_config": SMALL}, "m")


def test_an_unknown_family_is_refused_with_the_nearest_and_the_way_out():
    with pytest.raises(CatalogError) as refused:
        read_decoder({"model_type": "qwen4"}, "m")
    assert str(refused.value) == (
        'm: model_type = "qwen4": is no family known here. Nearest: "qwen3".'
        " Any other can be traced: name its folder as model.hf in a recipe."
    )
    with pytest.raises(CatalogError, match=r"Known: deepseek_v2, .* Any other can be traced"):
        read_decoder({"model_type": "bloom"}, "m")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "m: has no model_type, which says how the other keys are to be read. For example"),
        ({"model_type": 3}, "m: model_type = 3: is no word."),
        (
            {"model_type": "llama", "num_key_value_heads": 5},
            "m: num_key_value_heads: 5 does not divide num_attention_heads = 32. Nearest that work: 4 or 8.",
        ),
        (
            {"model_type": "llama", "num_attention_heads": 7},
            "m: num_attention_heads: 7 does not divide hidden_size = 4096."
            " Nearest that work: 4 or 8. Or give head_dim.",
        ),
        (
            {"model_type": "gpt2", "n_head": 7},
            "m: n_head: 7 does not divide hidden_size = 768. Nearest that work: 6 or 8.",
        ),
        (
            {"model_type": "gpt2", "n_embd": 768, "n_head": 7},
            "m: n_head: 7 does not divide n_embd = 768. Nearest that work: 6 or 8.",
        ),
        ({"model_type": "llama", "vocab_size": 0}, "m: vocab_size: is 0, must be at least 1. Nearest: 1."),
        (
            {"model_type": "llama", "hidden_size": "4096"},
            'm: hidden_size: is "4096", a string; must be a whole number. Nearest: 4096, without quotes.',
        ),
        (
            {"model_type": "llama", "tie_word_embeddings": 1},
            "m: tie_word_embeddings: is 1, a whole number; must be true or false. Nearest: true.",
        ),
        (
            {"model_type": "gpt2", "resid_pdrop": 1.5},
            "m: resid_pdrop: is 1.5, must be at most 1.0. Nearest: 1.0.",
        ),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 9},
            "m: num_experts_per_tok: 9 of num_local_experts = 8: a token passes at most all of them."
            " Nearest that works: 8.",
        ),
        (
            {"model_type": "deepseek_v2"},
            "m: num_experts_per_tok: is left out, and this family has no default for it.",
        ),
        (
            {"model_type": "gpt2", "add_cross_attention": True},
            "m: add_cross_attention: is true: that is a decoder of an encoder",
        ),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention"]},
            "m: layer_types: has 1 entries for 26 layers. It needs one for each layer; or leave it out.",
        ),
        (
            {"model_type": "gemma2", "layer_types": ["full_atention"] * 26},
            'm: layer_types: "full_atention" is not one of sliding_attention, full_attention.'
            ' Nearest: "full_attention".',
        ),
        ({"model_type": "gemma2", "layer_types": "full"}, 'm: layer_types: is "full"; must be a list.'),
        (
            {"model_type": "phi", "qk_layernorm": True, "head_dim": 80},
            "m: qk_layernorm: is true, and such norms are hidden_size / num_attention_heads wide, not head_dim = 80.",
        ),
        (
            {"model_type": "llama", "num_hidden_layers": 10**9},
            "m: num_hidden_layers: is 1000000000, must be at most 10000. Nearest: 10000.",
        ),
        (
            {"model_type": "llama", "vocab_size": 0, "hidden_size": -1},
            "m: vocab_size: is 0, must be at least 1. Nearest: 1. hidden_size: is -1, must be at least 1. Nearest: 1.",
        ),
    ],
)
def test_wrong_files_are_refused_with_the_rule(config, message):
    with pytest.raises(SpecError) as refused:
        read_decoder(config, "m")
    assert str(refused.value).startswith(message)


def test_all_faults_of_a_file_are_carried():
    with pytest.raises(SpecError) as refused:
        read("llama", vocab_size=0, hidden_size=-1, head_dim=True)
    assert {fault.where for fault in refused.value.faults} == {"vocab_size", "hidden_size", "head_dim"}


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 300), st.floats(), st.text(max_size=3), st.just([]), st.just({}),
    st.integers(2**62, 2**70), st.lists(st.sampled_from(["full_attention", "sliding_attention", 0, 1]), max_size=4),
)  # fmt: skip


@st.composite
def configs(draw, values):
    """A family with some of its keys."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    keys = [*DEFAULTS[family], *SPELLINGS.get(family, ())]
    chosen = draw(st.lists(st.sampled_from(keys), unique=True))
    return {"model_type": family} | {key: draw(values) for key in chosen}


@settings(max_examples=500, deadline=None)
@given(configs(ODD))
def test_whatever_a_file_holds_the_answer_is_a_model_or_one_error(config):
    try:
        spec = read_decoder(config, "m")
    except SpecError as error:
        assert str(error).startswith("m: ") and error.faults
    else:
        assert spec.num_parameters >= spec.active_parameters > 0


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.randoms(use_true_random=False))
def test_any_sound_file_makes_a_model_whose_runs_are_its_layers(family, random):
    config = sound_config(family, random)
    spec = read_decoder(config, "m")
    assert spec.n_layers == config.get("num_hidden_layers", config.get("n_layer"))
    assert len(set(spec.layers)) == len(spec.layers) <= 4
    assert spec.num_parameters == spec.embedding_parameters + spec.head_parameters + spec.other_parameters + sum(
        layer.count * spec.layer_parameters(layer) for layer in spec.layers
    )
