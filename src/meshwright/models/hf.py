"""`[model] hf = PATH`: a causal language model of the transformers library, from its config.json and its weights.

    beside config.json          what happens
    nothing                     fresh weights, drawn whole on every rank under the recipe's seed
    safetensors, same names     built without memory; once it has been cut, each rank reads the rows that it has
    safetensors, other names    transformers renames or joins tensors as it loads: whole on every rank, with a warning

Code that comes with a model (trust_remote_code) is never run, and pickles are never read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from meshwright.errors import CheckpointError, SpecError
from meshwright.models.built import Built, Index, cast_masters, parameters_on_meta
from meshwright.models.hf_config import attempt, find_folder, quiet, read_config, vocab_size_of
from meshwright.models.init import STD, generator
from meshwright.models.resolve import seeded
from meshwright.models.weights import (
    OF_ONE_MODEL,
    Match,
    find_files,
    matched,
    read_headers,
    read_part,
    require_same_shapes,
)
from meshwright.spec.nearest import first_of


def build_hf(hf: str, *, seq_len: int, tokenizer_vocab: int | None, seed: int, dtype: torch.dtype) -> Built:
    """Build a causal language model as its folder describes it, on the CPU.

    Args:
        hf: a folder with config.json, or a hub id.
        seq_len: tokens per row that the model will see.
        tokenizer_vocab: ids that the tokenizer can produce, None if the data does not say.
        seed: for weights that no file holds; the same on every rank.
        dtype: of the masters: float32 or float64.

    Raises:
        SpecError: no such model, none of this kind, or too small for the data.
        CheckpointError: its weights cannot be read, or are of another model.
    """
    asked = f'model.hf = "{hf}"'
    with quiet(asked):
        folder = find_folder(hf, asked)
        files = find_files(folder, asked)
        config = read_config(folder, asked)
        _require_vocab(config, tokenizer_vocab, asked)
        make = partial(_make, config, asked, seed)
        built = _filled_later(make, folder, files, asked, seed) if files else Built(make())
        _require_causal(built.module, asked)
        lines = [*built.lines, *_about_positions(built.module, config, seq_len)]
    model: Any = built.module
    model.config.use_cache = model.config.get_text_config().use_cache = False  # keys and values serve generation
    model.train()
    cast_masters(model, dtype)
    return replace(built, lines=lines)


def _require_vocab(config: Any, tokenizer_vocab: int | None, asked: str) -> None:
    size = vocab_size_of(config)
    if size is not None and tokenizer_vocab is not None and tokenizer_vocab > size:
        rule = f"has vocab_size {size} in its config.json, and data.tokenizer has {tokenizer_vocab} ids."
        raise SpecError(asked, rule, "Nearest: the tokenizer.json that belongs to the model.")


def _about_positions(model: nn.Module, config: Any, seq_len: int) -> list[str]:
    """Refuse rows longer than a table of positions; where positions are computed, say that they go beyond."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not most or seq_len <= most:
        return []
    if any("rotary" in name for name, _ in model.named_modules()):
        return [f"positions: data.seq_len {seq_len} is beyond the {most} that the model's config.json names"]
    rule = f"the model has {most} positions (max_position_embeddings)."
    raise SpecError(f"data.seq_len = {seq_len}", rule, f"Nearest: {most}.")


def _make(config: Any, asked: str, seed: int) -> nn.Module:
    """Build it with fresh weights, under the generators that are the same on every rank."""
    import transformers

    build = partial(transformers.AutoModelForCausalLM.from_config, dtype=torch.float32, trust_remote_code=False)
    with seeded(seed):
        model: nn.Module = attempt(asked, "building it", partial(build, config))
    return model


def _require_causal(model: nn.Module, asked: str) -> None:
    causal = {module.is_causal for module in model.modules() if hasattr(module, "is_causal")}
    if causal == {False}:
        rule = f"is a {type(model).__name__} that sees the tokens it is to predict (is_decoder is false)."
        raise SpecError(asked, rule, 'Write "is_decoder": true in config.json, or name a decoder.')


def _filled_later(make: Callable[[], nn.Module], folder: Path, files: list[Path], asked: str, seed: int) -> Built:
    """Build it without memory for its parameters, if the files have tensors by the module's names."""
    held = read_headers(files)
    try:
        with parameters_on_meta():
            model: Any = make()
    except SpecError:  # its constructor may compute with the weights; what else is wrong with it shows again
        return _whole(folder, asked, seed)
    match = matched(held, model, model.base_model_prefix)
    left_out = [name for name in match.left_out if not _is_known_stray(model, name)]
    made_up = [name for name in match.missing if _matches(name, model._keys_to_ignore_on_load_missing)]
    if _translates(model) or made_up or (left_out and match.missing):
        return _whole(folder, asked, seed)
    fresh = [name for name in match.missing if name in _head(model)]
    _require_all(folder, sorted({*match.missing} - {*fresh}), len(match.shapes))
    require_same_shapes(match)
    _fill_buffers(model, match)
    about = f"weights: {len(match.shapes)} tensors from {len(files)} file{'s' * (len(files) > 1)} in {folder}"
    fill = partial(_fill, match, getattr(model.config, "initializer_range", STD), seed)
    return Built(model, fill, [about], [*_about_fresh(fresh), *_about_left_out(left_out)])


def _head(model: Any) -> set[str]:
    """Names of the parameters of an output layer of its own, which files of a model without one do not have."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return set()
    return {f"{place}.{name}" for place, module in model.named_modules() if module is head for name in head._parameters}


def _is_known_stray(model: Any, name: str) -> bool:
    """A buffer of old files that today's model computes itself."""
    known = model._keys_to_ignore_on_load_unexpected
    return _matches(name, known) or _matches(name, (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"))


def _matches(name: str, patterns: Iterable[str] | None) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _translates(model: Any) -> bool:
    """Does transformers rename, split or join this model's tensors as it loads them, whatever they are called?"""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5
        return bool(getattr(model, "_checkpoint_conversion_mapping", None))
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def _fill_buffers(model: nn.Module, match: Match) -> None:
    for name, buffer in model.state_dict(keep_vars=True).items():
        if not isinstance(buffer, nn.Parameter) and name in match.sources:
            read_part(match.sources, name, buffer, ())


def _fill(match: Match, std: float, seed: int, name: str, part: torch.Tensor, index: Index) -> None:
    """Write a part of a parameter; of a head that no file has, the same fresh values on any layout."""
    if match.sources[name]:
        read_part(match.sources, name, part, index)
    elif name.endswith(".bias"):
        part.zero_()
    else:
        part.copy_(torch.empty(match.shapes[name]).normal_(0.0, std, generator=generator(seed, name))[index])


def _whole(folder: Path, asked: str, seed: int) -> Built:
    """Let transformers load it, with its own renaming; every rank then holds it whole for a while."""
    import transformers

    load = partial(
        transformers.AutoModelForCausalLM.from_pretrained,
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    with seeded(seed):
        model, info = attempt(asked, "loading its weights", partial(load, folder))
    fresh = sorted(set(info["missing_keys"]) & _head(model))
    _require_all(folder, sorted({*info["missing_keys"]} - {*fresh}), len(model.state_dict()))
    about = f"weights in {folder}: transformers renames or joins tensors of this model as it loads them, so every rank "
    about += "reads all of it, also where it is cut then"
    return Built(model, None, [], [about, *_about_fresh(fresh), *_about_left_out(sorted(info["unexpected_keys"]))])


def _require_all(folder: Path, lacks: list[str], number: int) -> None:
    if lacks:
        rule = f"lack {len(lacks)} of the model's {number} tensors: {first_of(lacks)}."
        raise CheckpointError(f"weights in {folder}", rule, OF_ONE_MODEL)


def _about_fresh(names: list[str]) -> list[str]:
    return [f"no weights for {first_of(names)}: the head starts from fresh ones"] if names else []


def _about_left_out(names: list[str]) -> list[str]:
    about = f"{len(names)} tensors in the files are not the model's, and are left out: {first_of(names)}"
    return [about] if names else []
