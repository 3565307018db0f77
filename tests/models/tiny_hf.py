"""Folders as the transformers library saves them: tiny models whose dimensions divide into no number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils import logging

get_checkpoint_conversion_mapping("llama")  # makes a table of half a second; ranks are forked with it
logging.disable_progress_bar()
logging.set_verbosity_error()

VOCAB, LAYERS = 131, 2
ROTARY: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=36, intermediate_size=101, num_hidden_layers=LAYERS, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
GPT2: dict[str, Any] = dict(
    model_type="gpt2", vocab_size=VOCAB, n_embd=36, n_inner=101, n_layer=LAYERS, n_head=4, n_positions=32,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": ROTARY | dict(model_type="llama", head_dim=10),
    "llama tied": ROTARY | dict(model_type="llama", head_dim=10, tie_word_embeddings=True),
    "qwen2": ROTARY | dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3": ROTARY | dict(model_type="qwen3", head_dim=10),
    "mistral": ROTARY | dict(model_type="mistral", head_dim=10),
    "gemma2": ROTARY | dict(model_type="gemma2", head_dim=10, query_pre_attn_scalar=10),
    "phi3": ROTARY | dict(model_type="phi3"),
    # transformers renames or joins these as it loads them
    "gpt_neox": ROTARY | dict(model_type="gpt_neox"),
    "mixtral": ROTARY | dict(model_type="mixtral", intermediate_size=20, num_local_experts=3),
}
TRANSLATED = ("gpt_neox", "mixtral")


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    """A folder with config.json alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    return folder


def drawn(folder: Path, seed: int = 0) -> Any:
    """A model by the folder's config with weights that no initialisation would give."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def write_model(
    folder: Path, name: str, shard: str = "5GB", dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """A folder with config and weights; `shard` is the largest size of a file."""
    drawn(write_config(folder, name, **changes)).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def loaded(folder: Path | str) -> dict[str, torch.Tensor]:
    """What transformers itself reads, tied tensors under all their names."""
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
