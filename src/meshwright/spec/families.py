"""A Hugging Face config.json -> DecoderSpec, without transformers and without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from meshwright.errors import CatalogError, SpecError
from meshwright.spec import family_dense, family_experts
from meshwright.spec.decoder import DecoderSpec
from meshwright.spec.family_config import FamilyConfig, family_config
from meshwright.spec.family_defaults import RENAMED
from meshwright.spec.nearest import closest, shown

FAMILIES: Final[Mapping[str, Callable[[FamilyConfig], DecoderSpec]]] = {
    "deepseek_v2": family_experts.deepseek,
    "deepseek_v3": family_experts.deepseek,
    "falcon": family_dense.falcon,
    "gemma": family_dense.llama,
    "gemma2": family_dense.gemma2,
    "gemma3_text": family_dense.gemma2,
    "gpt2": family_dense.gpt2,
    "gpt_neox": family_dense.gpt_neox,
    "gpt_oss": family_experts.gpt_oss,
    "granite": family_dense.llama,
    "llama": family_dense.llama,
    "mistral": family_dense.mistral,
    "mixtral": family_experts.mixtral,
    "olmo2": family_dense.olmo2,
    "phi": family_dense.phi,
    "phi3": family_dense.mistral,
    "qwen2": family_dense.qwen2,
    "qwen2_moe": family_experts.qwen2_moe,
    "qwen3": family_dense.qwen3,
    "qwen3_moe": family_experts.qwen3_moe,
    "smollm3": family_dense.smollm3,
    "starcoder2": family_dense.starcoder2,
}
"""model_type -> its reader."""

_TRACED: Final = "Any other can be traced: name its folder as model.hf in a recipe."


def read_decoder(config: Mapping[str, Any], name: str) -> DecoderSpec:
    """Read the architecture out of a config.json.

    What a file leaves out has the default of transformers' own configuration class. Of a model of several parts
    (`text_config`) the language model is read, and `source` says that the rest is not counted.

    Args:
        config: the file's content.
        name: of the model, as the user knows it.

    Raises:
        CatalogError: a model_type that is not known here.
        SpecError: no model_type, or values that are wrong by themselves or together.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        return _text_part(config, nested, name)
    family = _family(config, name)
    return replace(FAMILIES[family](family_config(config, family, name)), source=f"config.json, {family}")


def _text_part(config: Mapping[str, Any], nested: Mapping[str, Any], name: str) -> DecoderSpec:
    whole = config.get("model_type")
    shared = {key: config[key] for key in ("model_type", "tie_word_embeddings") if key in config}
    spec = read_decoder({**shared, **nested, "text_config": None}, name)
    return replace(spec, source=f"the language model of config.json, {whole}; its other parts are not counted")


def _family(config: Mapping[str, Any], name: str) -> str:
    """The key of `FAMILIES` that reads a file."""
    given = config.get("model_type")
    if not isinstance(given, str) or not given:
        rule = "has no model_type, which says how the other keys are to be read." if given is None else "is no word."
        asked = name if given is None else f"{name}: model_type = {shown(given)}"
        raise SpecError(asked, rule, f'For example "llama". Known: {", ".join(FAMILIES)}.')
    family = RENAMED.get(given, given)
    if family not in FAMILIES:
        near = closest(given, FAMILIES)
        nearest = f'Nearest: "{near}".' if near else f"Known: {', '.join(FAMILIES)}."
        raise CatalogError(f"{name}: model_type = {shown(given)}", "is no family known here.", f"{nearest} {_TRACED}")
    return family
