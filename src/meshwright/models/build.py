"""From `[model]` to an nn.Module with its initial weights, equal on every rank."""

from __future__ import annotations

import hashlib
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from meshwright.errors import SpecError
from meshwright.models.anatomy import parameters_in_order
from meshwright.models.built import Built, Index, cast_masters, fill_whole
from meshwright.models.gpt2 import Gpt2
from meshwright.models.hf import build_hf
from meshwright.models.init import initial_value
from meshwright.models.llama import Llama
from meshwright.models.resolve import call_build, resolve_callable
from meshwright.spec.sections import ModelSection
from meshwright.spec.shape import DecoderShape, resolve_shape


def build_model(
    section: ModelSection, *, seq_len: int, tokenizer_vocab: int | None, seed: int, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Build the model that a recipe describes, whole, on the CPU; see `begin_model`."""
    built = begin_model(section, seq_len=seq_len, tokenizer_vocab=tokenizer_vocab, seed=seed, dtype=dtype)
    return fill_whole(built).module


def begin_model(
    section: ModelSection, *, seq_len: int, tokenizer_vocab: int | None, seed: int, dtype: torch.dtype = torch.float32
) -> Built:
    """Build the model that a recipe describes, on the CPU; one that files hold has no memory for parameters yet.

    Args:
        section: `[model]`.
        seq_len: tokens per row that the model will see; for `name` and `hf`.
        tokenizer_vocab: ids that the tokenizer can produce, None if the data does not say; for `name` and `hf`.
        seed: the recipe's.
        dtype: of the masters: float32, or float64 for proofs.

    Raises:
        SpecError: sizes that do not fit together, or a `build` function or `hf` model that cannot be found or built.
        CheckpointError: files of weights that cannot be read, or are of another model.
    """
    if section.hf is not None:
        own = build_seed(seed, "model.hf")
        return build_hf(section.hf, seq_len=seq_len, tokenizer_vocab=tokenizer_vocab, seed=own, dtype=dtype)
    if section.build is not None:
        return Built(build_own(section.build, dict(section.arguments), seed, dtype))
    return _begin_reference(resolve_shape(section, seq_len, tokenizer_vocab), seed, dtype)


def build_reference(shape: DecoderShape, seed: int, dtype: torch.dtype = torch.float32) -> Gpt2 | Llama:
    """Build a reference model with initial weights that depend on (seed, parameter name) only."""
    return cast(Gpt2 | Llama, fill_whole(_begin_reference(shape, seed, dtype)).module)


def _begin_reference(shape: DecoderShape, seed: int, dtype: torch.dtype) -> Built:
    with torch.device("meta"):  # no memory and no default initialisation
        model = Gpt2(shape) if shape.name == "gpt2" else Llama(shape)
    model.to(dtype)
    shapes = {name: parameter.shape for name, parameter in parameters_in_order(model)}

    def fill(name: str, part: torch.Tensor, index: Index) -> None:
        part.copy_(initial_value(name, shapes[name], seed, shape.n_layers)[index])

    return Built(model, fill)


def build_own(spec: str, arguments: dict[str, Any], seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build the user's own model. What its constructor made is kept, pretrained weights included."""
    key = "model.build"
    made = call_build(resolve_callable(spec, key), arguments, spec=spec, key=key, seed=build_seed(seed, key))
    return adopt(made, f'{key} = "{spec}"', dtype)


def adopt(made: Any, asked: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Take over what a user made: check that it is a module with weights, and cast its masters in place.

    Args:
        made: should be an nn.Module.
        asked: where it came from, for messages.
        dtype: of floating-point parameters and buffers afterwards; ties hold.

    Raises:
        SpecError: it is no module, or some of its parameters have no values yet.
    """
    model = _require_module(made, asked)
    cast_masters(model, dtype)
    return model


def build_seed(seed: int, key: str) -> int:
    """The seed under which a `build` function runs: its own for each recipe key, the same on every rank."""
    digest = hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _require_module(made: Any, asked: str) -> nn.Module:
    """The result as a module whose parameters exist."""
    if not isinstance(made, nn.Module):
        raise SpecError(asked, f"returned {_kind(made)}, and a torch.nn.Module is needed.", _return_hint(made))
    for name, parameter in made.named_parameters():
        if is_lazy(parameter):
            raise SpecError(
                asked, f"`{name}` has no shape yet.", "Run one batch through the model before you return it."
            )
        if parameter.is_meta:
            rule = f"`{name}` is on the meta device and has no values."
            raise SpecError(asked, rule, "Return the model with its weights, on the CPU.")
    return made


def _kind(made: Any) -> str:
    if isinstance(made, type):
        return f"the class {made.__name__}"
    return "None" if made is None else f"a value of type {type(made).__name__}"


def _return_hint(made: Any) -> str:
    if made is None:
        return "Does the function end without `return`?"
    if isinstance(made, type):
        return f"Return {made.__name__}(...), an object of it."
    parts = made.values() if isinstance(made, dict) else made if isinstance(made, list | tuple) else ()
    return "Return the model alone." if any(isinstance(part, nn.Module) for part in parts) else ""
