"""What a config.json of each family may leave out: the keys that decide its shape, with their defaults.

The values are those of the configuration classes of transformers 5 (models/*/configuration_*.py), which fill in what a
file lacks; `tests/models/test_families_against_transformers.py` compares them with the installed ones. Only keys that
decide a number of parameters, a window or a dropout stand here; all other keys of a file are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Defaults = Mapping[str, Any]
"""Key -> default. None: the key may be null or left out, and the family says what that means."""

_LLAMA: Final[dict[str, Any]] = dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=None, head_dim=None, max_position_embeddings=2048, tie_word_embeddings=False,
    attention_bias=False, mlp_bias=False,
)  # fmt: skip
_QWEN2: Final[dict[str, Any]] = dict(
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, head_dim=None, max_position_embeddings=32768, tie_word_embeddings=False,
    use_sliding_window=False, sliding_window=4096, max_window_layers=28, layer_types=None,
)  # fmt: skip
_QWEN2_MOE: Final[dict[str, Any]] = _QWEN2 | dict(
    hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16,
    qkv_bias=True, decoder_sparse_step=1, mlp_only_layers=None, num_experts=60, num_experts_per_tok=4,
    moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
)  # fmt: skip
_QWEN3_MOE: Final[dict[str, Any]] = dict(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=32,
    num_key_value_heads=4, head_dim=None, max_position_embeddings=32768, tie_word_embeddings=False,
    attention_bias=False, use_sliding_window=False, sliding_window=4096, decoder_sparse_step=1, mlp_only_layers=None,
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
)  # fmt: skip
_MIXTRAL: Final[dict[str, Any]] = dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=None, max_position_embeddings=131072, tie_word_embeddings=False,
    sliding_window=None, num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
_GEMMA: Final[dict[str, Any]] = dict(
    vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=16, head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True, attention_bias=False,
)  # fmt: skip
_GEMMA2: Final[dict[str, Any]] = _GEMMA | dict(
    hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4,
    sliding_window=4096, layer_types=None, final_logit_softcapping=30.0, attn_logit_softcapping=50.0,
)  # fmt: skip
_GEMMA3: Final[dict[str, Any]] = _GEMMA2 | dict(
    vocab_size=262208, max_position_embeddings=131072, sliding_window_pattern=6, final_logit_softcapping=None,
    attn_logit_softcapping=None,
)  # fmt: skip
_DEEPSEEK_V2: Final[dict[str, Any]] = dict(
    vocab_size=102400, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    max_position_embeddings=2048, tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    first_k_dense_replace=0, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=None,
    moe_intermediate_size=1407,
)  # fmt: skip
_DEEPSEEK_V3: Final[dict[str, Any]] = _DEEPSEEK_V2 | dict(
    vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, num_attention_heads=128,
    max_position_embeddings=4096, first_k_dense_replace=3, n_routed_experts=256, n_shared_experts=1,
    num_experts_per_tok=8, moe_intermediate_size=2048,
)  # fmt: skip
_GPT_OSS: Final[dict[str, Any]] = dict(
    vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36, num_attention_heads=64,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, tie_word_embeddings=False, attention_bias=True,
    sliding_window=128, layer_types=None, num_local_experts=128, num_experts_per_tok=4,
)  # fmt: skip
_GPT2: Final[dict[str, Any]] = dict(
    vocab_size=50257, hidden_size=768, intermediate_size=None, num_hidden_layers=12, num_attention_heads=12,
    max_position_embeddings=1024, tie_word_embeddings=True, resid_pdrop=0.1, add_cross_attention=False,
)  # fmt: skip
_GPT_NEOX: Final[dict[str, Any]] = dict(
    vocab_size=50432, hidden_size=6144, intermediate_size=24576, num_hidden_layers=44, num_attention_heads=64,
    max_position_embeddings=2048, tie_word_embeddings=False, attention_bias=True, use_parallel_residual=True,
    hidden_dropout=0.0,
)  # fmt: skip
_FALCON: Final[dict[str, Any]] = dict(
    vocab_size=65024, hidden_size=4544, intermediate_size=None, num_hidden_layers=32, num_attention_heads=71,
    num_key_value_heads=None, max_position_embeddings=2048, tie_word_embeddings=True, bias=False, parallel_attn=True,
    multi_query=True, new_decoder_architecture=False, num_ln_in_parallel_attn=None, hidden_dropout=0.0,
)  # fmt: skip
_PHI: Final[dict[str, Any]] = dict(
    vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32,
    num_key_value_heads=None, head_dim=None, max_position_embeddings=2048, tie_word_embeddings=False,
    qk_layernorm=False, resid_pdrop=0.0,
)  # fmt: skip
_STARCODER2: Final[dict[str, Any]] = dict(
    vocab_size=49152, hidden_size=3072, intermediate_size=12288, num_hidden_layers=30, num_attention_heads=24,
    num_key_value_heads=2, head_dim=None, max_position_embeddings=4096, tie_word_embeddings=True, use_bias=True,
    sliding_window=None, residual_dropout=0.0,
)  # fmt: skip

DEFAULTS: Final[Mapping[str, Defaults]] = {
    "llama": _LLAMA,
    "mistral": {k: v for k, v in _MIXTRAL.items() if "experts" not in k} | dict(sliding_window=4096),
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | dict(head_dim=128, attention_bias=False),
    "qwen2_moe": _QWEN2_MOE,
    "qwen3_moe": _QWEN3_MOE,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "falcon": _FALCON,
    "phi": _PHI,
    "phi3": {k: v for k, v in _LLAMA.items() if "bias" not in k} | dict(
        vocab_size=32064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096, sliding_window=None,
        resid_pdrop=0.0,
    ),
    "mixtral": _MIXTRAL,
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": {k: v for k, v in _DEEPSEEK_V3.items() if k != "mlp_bias"},
    "gpt_oss": _GPT_OSS,
    "olmo2": {k: v for k, v in _LLAMA.items() if k != "mlp_bias"} | dict(vocab_size=50304),
    "starcoder2": _STARCODER2,
    "smollm3": _LLAMA | dict(
        vocab_size=128256, hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=4,
        max_position_embeddings=32768, tie_word_embeddings=True, use_sliding_window=False, sliding_window=None,
        layer_types=None, no_rope_layers=None, no_rope_layer_interval=4,
    ),
    "granite": _LLAMA,
}  # fmt: skip
"""model_type -> its keys; the keys of gpt2 and falcon under the names that the others use (`SPELLINGS`)."""

SPELLINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "gpt2": {
        "n_embd": "hidden_size", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads", "n_positions": "max_position_embeddings",
    },
    "falcon": {"n_embed": "hidden_size", "ffn_hidden_size": "intermediate_size", "num_kv_heads": "num_key_value_heads"},
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
}  # fmt: skip
"""model_type -> other spelling of a key -> the key above."""

RENAMED: Final[Mapping[str, str]] = {
    "gemma3": "gemma3_text",
}
"""model_type of a file -> the family that reads it (of a nested file, its text part)."""
