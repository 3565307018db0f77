"""config.json read without torch against the models that transformers builds from it: parameters to the last one."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging

from meshwright.spec.catalogue import catalogue, find_model
from meshwright.spec.families import FAMILIES, read_decoder
from spec.sound_configs import sound_config

logging.set_verbosity_error()


def made(config: dict[str, Any]) -> Any:
    """The model, with every tensor on the meta device."""
    keys = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**keys))


def parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_transformers_with_any_switches(family):
    random = Random(family)
    for _ in range(12):
        config = sound_config(family, random)
        assert read_decoder(config, "m").num_parameters == parameters(made(config)), config


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_file_leaves_out_has_the_default_of_transformers(family):
    passed = {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}
    whole = CONFIG_MAPPING[family](**passed).to_dict() | {"model_type": family}
    assert read_decoder(whole, "m") == read_decoder({"model_type": family} | passed, "m")


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_and_their_windows_are_those_of_transformers(family):
    random = Random(family)
    for _ in range(6):
        config = sound_config(family, random)
        assert windows_of(read_decoder(config, "m")) == transformers_windows(made(config)), config


def windows_of(spec: Any) -> dict[int | None, int]:
    found: dict[int | None, int] = {}
    for layer in spec.layers:
        found[layer.attention.window] = found.get(layer.attention.window, 0) + layer.count
    return found


def transformers_windows(model: Any) -> dict[int | None, int]:
    """How many attentions look how far back, as transformers' masks have it."""
    config, found = model.config, {}
    kinds = getattr(config, "layer_types", None) or ["same"] * config.num_hidden_layers
    for kind in kinds:
        slides = kind in ("sliding_attention", "same")
        window = (getattr(config, "sliding_window", None) or None) if slides else None
        found[window] = found.get(window, 0) + 1
    return found


REAL = (
    "gpt2-xl", "gpt-neox-20b", "falcon-40b", "llama-3.1-405b", "qwen2.5-7b", "qwen3-0.6b", "mistral-7b",
    "mixtral-8x7b", "gemma-2-9b", "gemma-3-27b", "qwen3-30b-a3b", "phi-2", "phi-4", "deepseek-v2-lite", "gpt-oss-20b",
)  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_models_of_real_size_have_their_parameters(name):
    assert find_model(name).num_parameters == parameters(made(dict(catalogue()[name]["config"])))


def test_the_routing_bias_of_deepseek_v3_is_a_buffer_in_transformers():
    """The catalogue counts it as the model's own program does; a config.json as transformers does."""
    config = dict(catalogue()["deepseek-v3-671b"]["config"])
    model = made(config)
    assert read_decoder(config, "m").num_parameters == parameters(model)
    biases = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert find_model("deepseek-v3-671b").num_parameters - parameters(model) == biases == 58 * 256
