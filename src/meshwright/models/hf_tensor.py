"""The tensor-parallel plan that a Hugging Face model carries, as a table of ours.

A config's `base_model_tp_plan` and the model's own `_tp_plan` (for its head) map patterns of module names to words. The
words are those of transformers.distributed.tensor_parallel (transformers 5; transformers.integrations.tensor_parallel
before). Their activations are whole between matrices: no sequence parallelism. A plan does not say what a whole head
is; the config does. Where a plan cuts a head that shares the embedding's weight, the embedding is cut with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch.nn as nn

from meshwright.errors import SpecError
from meshwright.spec.nearest import first_of
from meshwright.spec.tensor_rules import Style, TensorRules, matches

STYLES: Final[Mapping[str, str]] = {
    "colwise": "column",
    "colwise_gather_output": "column-gather",
    "colwise_rep": "column-gather",
    "rowwise": "row",
    "rowwise_split_input": "row-split",
    "rowwise_rep": "row-split",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "partial",
    "replicate": "replicated",
}
"""Their words and ours. Theirs for experts, packed and fused weights are refused."""
KEYS_AND_VALUES: Final = ("k_proj", "v_proj", "key", "value", "key_proj", "value_proj", "wk", "wv")


def hf_rules(model: nn.Module) -> TensorRules:
    """The table of a Hugging Face model, from its own plan.

    Args:
        model: a whole causal language model of transformers.

    Raises:
        SpecError: it has no plan, or one with a word that is not known here.
    """
    own: Any = model
    base = getattr(own.config.get_text_config(), "base_model_tp_plan", None)
    asked = f"the model {type(model).__name__}"
    if not base:
        rule = "carries no plan for tensor parallelism (base_model_tp_plan in its config)."
        raise SpecError(asked, rule, "Give one in layout.tensor, or set layout.tp = 1.")
    prefix = f"{own.base_model_prefix}." if own.base_model_prefix else ""
    plan = {f"{prefix}{pattern}": word for pattern, word in base.items()} | (getattr(own, "_tp_plan", None) or {})
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    plan = {pattern: word for pattern, word in plan.items() if any(matches(name, pattern) for name in names)}
    unknown = sorted({word for word in plan.values() if word not in STYLES})
    if unknown:
        rule = f"its plan for tensor parallelism has the words {first_of(unknown)}, which are not supported."
        raise SpecError(asked, rule, f"Known are {', '.join(STYLES)}. Give a table in layout.tensor, or layout.tp = 1.")
    return TensorRules((*_heads(own, plan), *_pieces(own.config.get_text_config(), plan)))


def share_heads(model: nn.Module) -> None:
    """Have each attention module repeat keys and values as its rank's part of the heads asks for.

    A rank that shares a key and value head with its neighbours has fewer query heads to each.

    Args:
        model: after `cut_tensors`, and before ZeRO cuts further.
    """
    for module in model.modules():
        query, key = getattr(module, "q_proj", None), getattr(module, "k_proj", None)
        if hasattr(module, "num_key_value_groups") and isinstance(query, nn.Linear) and isinstance(key, nn.Linear):
            setattr(module, "num_key_value_groups", len(query.weight) // len(key.weight))  # noqa: B010 -- no field of nn.Module


def _heads(model: Any, plan: Mapping[str, str]) -> Iterator[tuple[str, Style]]:
    """The head's logits may stay cut; an embedding that shares its weight is cut alike. These rows come first."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    words = [word for pattern, word in plan.items() if head is not None and matches(names[id(head)], pattern)]
    if words and STYLES[words[0]] == "column-gather":
        yield names[id(head)], Style("head")
        if head.weight is embedding.weight:
            yield names[id(embedding)], Style("vocabulary")


def _pieces(config: Any, plan: Mapping[str, str]) -> Iterator[tuple[str, Style]]:
    """Every row of a plan; in attention modules matrices are cut in whole heads."""
    n_heads = config.num_attention_heads
    n_kv_heads = getattr(config, "num_key_value_heads", None) or n_heads
    for pattern, word in plan.items():
        style, parts = STYLES[word], pattern.split(".")
        is_attention = any("attn" in part or "attention" in part for part in parts[:-1])
        if is_attention and style in ("column", "row"):
            yield pattern, Style(style, n_kv_heads if parts[-1] in KEYS_AND_VALUES else n_heads)
        else:
            yield pattern, Style(style)
