"""The module of a recipe, for a trace: without memory where nothing needs the values."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn as nn

from meshwright.models.build import begin_model
from meshwright.models.hf_config import attempt, find_folder, quiet, read_config
from meshwright.spec.sections import ModelSection


def module_to_trace(section: ModelSection, *, seq_len: int, tokenizer_vocab: int | None, seed: int) -> nn.Module:
    """Build what `[model]` describes, in training mode, with masters in fp32.

    The reference models and those of transformers come on the meta device, and no file of weights is read. A user's own
    `build` runs as it does on a rank: its constructor may compute with the weights.

    Args:
        section: `[model]`.
        seq_len: tokens per row that the model will see; for `name`.
        tokenizer_vocab: ids that the tokenizer can produce, None if the data does not say; for `name`.
        seed: the recipe's.

    Raises:
        SpecError: sizes that do not fit together, or a `build` function or `hf` model that cannot be found or built.
    """
    if section.hf is not None:
        return _transformers(section.hf)
    return begin_model(section, seq_len=seq_len, tokenizer_vocab=tokenizer_vocab, seed=seed).module.train()


def _transformers(hf: str) -> nn.Module:
    """The model that a folder's config.json describes, as models/hf.py has it, but for its weights."""
    asked = f'model.hf = "{hf}"'
    with quiet(asked):
        import transformers

        config = read_config(find_folder(hf, asked), asked)
        build = partial(transformers.AutoModelForCausalLM.from_config, dtype=torch.float32, trust_remote_code=False)
        with torch.device("meta"):
            model = attempt(asked, "building it", partial(build, config))
    model.config.use_cache = model.config.get_text_config().use_cache = False  # keys and values serve generation
    module: nn.Module = model.train()
    return module
