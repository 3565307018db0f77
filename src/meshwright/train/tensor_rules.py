"""How tp cuts the model of a recipe: by `[layout] tensor`, else by the model's own rules."""

from __future__ import annotations

import torch.nn as nn

from meshwright.errors import SpecError
from meshwright.models.gpt2 import Gpt2
from meshwright.models.hf_tensor import hf_rules
from meshwright.models.llama import Llama
from meshwright.spec.recipe import Recipe
from meshwright.spec.tensor_rules import TensorRules, reference_rules, rules_of


def tensor_rules_of(model: nn.Module, recipe: Recipe) -> TensorRules:
    """The table of a model.

    Raises:
        SpecError: nobody says how it is cut.
    """
    if recipe.layout.tensor is not None:
        return rules_of(dict(recipe.layout.tensor))
    if isinstance(model, Gpt2 | Llama):
        shape = model.shape
        return reference_rules(shape.name, shape.n_heads, shape.n_kv_heads)
    if hasattr(model, "config") and recipe.model.hf is not None:
        return hf_rules(model)
    raise SpecError(
        f"layout.tp = {recipe.layout.tp}",
        f"needs to know how {type(model).__name__} is cut.",
        'Say it in [layout.tensor], as in "blocks.*.up" = "column"; or set layout.tp = 1.',
    )
