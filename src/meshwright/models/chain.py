"""A model as a chain: what comes before its blocks, the blocks, and what comes after. Pipelines cut it so.

    begin(input) -> x        embeddings, dropout
    through(x, blocks, n)    any run of blocks, in order; n places of the sequence
    end(x) -> output         the last norm, the head

Models that have these three methods and a list `blocks` are chains: the reference models, and any of the user's own.
Of Hugging Face models those are, whose stages can be told apart by leaving modules out: an absent layer, norm or head
hands its input on, and hidden states enter in the embedding's place.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.nn as nn

from meshwright.errors import SpecError
from meshwright.models.anatomy import bare_name, repeated_blocks

METHODS: Final = ("begin", "through", "end")

HF_CHAINS: Final = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "smollm3")
"""Model types of transformers that do nothing to hidden states outside embedding, layers, norm and head."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A model taken apart; names are those of the whole model.

    Attributes:
        blocks: the repeated blocks in order, with their names.
        begin: names of the modules that come before them.
        end: names of those that come after.
    """

    blocks: Sequence[tuple[str, nn.Module]]
    begin: Sequence[str]
    end: Sequence[str]


def chain_of(model: nn.Module) -> Chain:
    """Take a model apart.

    Raises:
        SpecError: it is no chain.
    """
    blocks = repeated_blocks(model)
    if blocks and all(callable(getattr(model, name, None)) for name in METHODS):
        begin, end = _sides(model, blocks)
        return Chain(blocks, begin, end)
    if is_hf_chain(model):
        return Chain(blocks, ("model.embed_tokens",), ("model.norm", "lm_head"))
    raise SpecError(
        f"a pipeline of {type(model).__name__}",
        "needs a model that is a chain: equal blocks in a list, and methods begin(input), through(x, blocks, seq_len) "
        "and end(x) around them; of Hugging Face models these are " + ", ".join(HF_CHAINS) + ".",
        "Nearest: give it these methods (docs/layouts.md), or set layout.pp = 1.",
    )


def _sides(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> tuple[list[str], list[str]]:
    """Modules with parameters before and after the list of blocks, in the order in which they were registered."""
    within = blocks[0][0].split(".")[0]
    names = [bare_name(name) for name, _ in model.named_children()]
    at = names.index(within)
    return names[:at], names[at + 1 :]


def is_hf_chain(model: nn.Module) -> bool:
    """Is this one of transformers' causal models that can be cut by leaving modules out?"""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    parts = ("embed_tokens", "layers", "norm")
    inner = getattr(model, "model", None)
    return kind in HF_CHAINS and hasattr(model, "lm_head") and all(hasattr(inner, name) for name in parts)


@final
class HandsOn(nn.Module):
    """Stands for a module that another stage has."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument."""
        return x


@final
class Section(nn.Module):
    """A run of a chain's blocks, with its beginning or its end: what one stage of a pipeline computes.

    Its children are the very modules of the model, which keep their names there; names in here mean nothing.

    Args:
        model: whole or with what this rank does not have left out.
        blocks: by name, those of this section.
        begins: does it have what comes before the blocks?
        ends: does it have what comes after them?
        chain: of the whole model.
    """

    def __init__(
        self, model: nn.Module, blocks: Mapping[str, nn.Module], begins: bool, ends: bool, chain: Chain
    ) -> None:
        super().__init__()
        self.begins, self.ends = begins, ends
        self.blocks = nn.ModuleList(blocks.values())
        kept = [*(chain.begin if begins else ()), *(chain.end if ends else ())]
        self.sides = nn.ModuleList(model.get_submodule(name) for name in kept)
        self._run = _shell(model, blocks, begins, ends, chain) if is_hf_chain(model) else None
        object.__setattr__(self, "_model", model)  # no child: its other blocks are not of this section

    @property
    def calls_model(self) -> bool:
        """Does a pass go through the model's own call, with its hooks?"""
        return self._run is not None

    def forward(self, x: torch.Tensor, seq_len: int) -> torch.Tensor:
        """Tokens (b, s) where it begins the model, else hidden states (b, s, d); logits (b, s, v) where it ends it."""
        if self._run is not None:
            return self._run.forward_of(x)
        model: Any = self._model
        if self.begins:
            x = model.begin(x)
        x = model.through(x, self.blocks, seq_len)
        return model.end(x) if self.ends else x


@final
class _Shell:
    """A causal model of transformers in which other stages' modules hand their input on."""

    def __init__(self, model: Any, begins: bool) -> None:
        self._model, self._begins = model, begins

    def forward_of(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens or hidden states in, hidden states or logits out."""
        given = {"input_ids": x} if self._begins else {"inputs_embeds": x}
        out: torch.Tensor = self._model(**given, use_cache=False).logits
        return out


def _shell(model: Any, blocks: Mapping[str, nn.Module], begins: bool, ends: bool, chain: Chain) -> _Shell:
    inner, outer = _thin(model.model), _thin(model)
    layers = [blocks.get(name, HandsOn()) for name, _ in chain.blocks]
    inner._modules["layers"] = nn.ModuleList(layers)
    if not ends:
        inner._modules["norm"], outer._modules["lm_head"] = HandsOn(), HandsOn()
    outer._modules["model"] = inner
    return _Shell(outer, begins)


def _thin(module: Any) -> Any:
    """A copy that shares everything, but has a list of children of its own."""
    thin = copy.copy(module)
    thin._modules = dict(module._modules)
    return thin
