"""Small and odd files that transformers accepts: of any family, with any of its switches."""

from __future__ import annotations

from random import Random
from typing import Any

from meshwright.spec.family_defaults import DEFAULTS

RATES = ("hidden_dropout", "resid_pdrop", "residual_dropout")
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
GPT2 = {
    "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
}  # fmt: skip
FALCON = {"intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads"}


def sound_config(family: str, random: Random) -> dict[str, Any]:
    """A config.json of this family that describes a model of some thousand parameters."""
    defaults = DEFAULTS[family]
    layers, kv_heads = random.randint(1, 5), random.randint(1, 3)
    heads = kv_heads * random.randint(1, 3)
    config: dict[str, Any] = {key: random.randint(1, 9) for key in defaults}
    config |= {key: random.random() < 0.5 for key, default in defaults.items() if type(default) is bool}
    config |= {key: random.choice((0.0, 0.5)) for key in RATES if key in defaults}
    config |= {key: random.choice((None, 30.0)) for key in CAPS if key in defaults}
    config |= {key: None for key in ("layer_types", "no_rope_layers") if key in defaults}
    config |= dict(num_hidden_layers=layers, num_attention_heads=heads, hidden_size=heads * 2 * random.randint(1, 3))
    config |= dict(vocab_size=random.randint(1, 200), max_position_embeddings=random.randint(1, 64))
    nullable = defaults.get("num_key_value_heads", 0) is None
    config["num_key_value_heads"] = random.choice((None, kv_heads)) if nullable else kv_heads
    if "head_dim" in defaults and random.random() < 0.7 and family != "phi":
        config["head_dim"] = 2 * random.randint(1, 4)
    else:
        config.pop("head_dim", None)
    config |= _odd(family, random, layers)
    if family in ("phi3", "smollm3"):
        config |= {"pad_token_id": 0}
    spelt = {"gpt2": GPT2, "falcon": FALCON}.get(family, {})
    kept = {spelt.get(key, key): value for key, value in config.items() if key in (*defaults, "pad_token_id")}
    return {"model_type": family} | kept


def _odd(family: str, random: Random, layers: int) -> dict[str, Any]:
    """Keys of one family, of which not all values go with all."""
    even = 2 * random.randint(1, 3)
    match family:
        case "deepseek_v2" | "deepseek_v3":
            return dict(
                q_lora_rank=random.choice((None, random.randint(1, 5))), kv_lora_rank=random.randint(1, 5),
                qk_nope_head_dim=random.randint(1, 6), qk_rope_head_dim=even, v_head_dim=random.randint(1, 6),
                n_routed_experts=4, n_shared_experts=random.randint(1, 2), num_experts_per_tok=random.randint(1, 4),
                first_k_dense_replace=random.randint(0, layers),
            )  # fmt: skip
        case "mixtral" | "gpt_oss":
            return dict(num_local_experts=4, num_experts_per_tok=random.randint(1, 4))
        case "qwen2_moe" | "qwen3_moe":
            return dict(
                num_experts=4, num_experts_per_tok=random.randint(1, 4), decoder_sparse_step=random.randint(1, 3),
                mlp_only_layers=random.sample(range(layers), random.randint(0, layers)),
            )  # fmt: skip
        case "falcon":
            return dict(num_ln_in_parallel_attn=random.choice((None, 1, 2)))
        case "gpt2":
            return dict(add_cross_attention=False, intermediate_size=random.choice((None, 7)))
        case "phi":
            return dict(qk_layernorm=random.random() < 0.5)
        case _:
            return {}
