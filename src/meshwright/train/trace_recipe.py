"""A recipe's model as a ModelSpec file: `python -m meshwright.train.trace_recipe RECIPE.toml --out FILE`.

The plan wing is free of torch; where it needs a module traced, it asks a process of this program (plan/ask_trace.py).
Nothing is trained and no weights are read: a recipe of a large model is traced on a laptop.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from meshwright.errors import MeshwrightError
from meshwright.models.build import build_seed
from meshwright.models.hf_config import hf_vocab_size
from meshwright.models.resolve import call_build, resolve_callable
from meshwright.models.trace import MICROBATCHES, trace_module
from meshwright.models.trace_build import module_to_trace
from meshwright.parallel.recompute import selective_contexts
from meshwright.spec.load import load
from meshwright.spec.model_file import spec_to_json
from meshwright.spec.model_spec import ModelSpec
from meshwright.spec.recipe import Recipe
from meshwright.train.corpus import load_corpus
from meshwright.train.dataset import DatasetSource
from meshwright.train.loader import Place
from meshwright.train.loss import LossFunction, token_cross_entropy


def main(words: Sequence[str]) -> int:
    """Trace a recipe's model and write the file.

    Returns:
        0, or the exit code of what is wrong with the recipe; one line on stderr says what.
    """
    options = _parser().parse_args(words)
    torch.set_num_threads(1)
    try:
        recipe = load(options.recipe, options.set)
        spec = trace_recipe(recipe, kernels=options.kernels, microbatches=tuple(options.microbatch))
    except MeshwrightError as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return error.exit_code
    beside = f"{options.out}.part"
    with open(beside, "w", encoding="utf-8") as file:
        file.write(spec_to_json(spec))
    os.replace(beside, options.out)
    return 0


def trace_recipe(
    recipe: Recipe, *, kernels: Literal["cuda", "cpu"], microbatches: tuple[int, int] = MICROBATCHES
) -> ModelSpec:
    """Describe the model of a recipe, with its loss and its data, for the cost room.

    Args:
        recipe: the run.
        kernels: cuda | cpu, whose kernels decide what is kept.
        microbatches: the two sizes of the trace.

    Raises:
        SpecError: the model cannot be built, or does not run on its data.
        DataError: the data cannot be read.
    """
    vocab_size, batch_of = _data(recipe)
    seed, model = recipe.train.seed, recipe.model
    return trace_module(
        module_to_trace(model, seq_len=recipe.data.seq_len, tokenizer_vocab=vocab_size, seed=seed),
        _loss(recipe),
        batch_of,
        compute=recipe.precision.compute,
        kernels=kernels,
        seq_len=recipe.data.seq_len if recipe.data.build is None else seq_len_of(batch_of),
        name=model.name or model.hf or str(model.build),
        selective=partial(selective_contexts, "block"),
        microbatches=microbatches,
    )


def _loss(recipe: Recipe) -> LossFunction:
    return resolve_callable(recipe.loss.build, "loss.build") if recipe.loss.build else token_cross_entropy


def _data(recipe: Recipe) -> tuple[int | None, Callable[[int], Any]]:
    """Ids that the tokenizer can produce (None if that does not matter), and microbatches of any size."""
    if recipe.data.build is None:
        open_size = recipe.model.name is not None and recipe.model.vocab_size is None
        return load_corpus(recipe.data).vocab_size if open_size else None, partial(tokens_of, recipe.data.seq_len)
    seed = build_seed(recipe.train.seed, "data.build")
    function = resolve_callable(recipe.data.build, "data.build")
    arguments = dict(recipe.data.arguments)
    dataset = call_build(function, arguments, spec=recipe.data.build, key="data.build", seed=seed)
    known = hf_vocab_size(recipe.model.hf) if recipe.model.hf else recipe.model.vocab_size
    return known, partial(samples_of, DatasetSource(dataset, recipe.train.seed, workers=0))


def tokens_of(seq_len: int, size: int) -> dict[str, torch.Tensor]:
    """A microbatch of a token source; no operator's memory depends on which tokens they are."""
    row = torch.zeros(size, seq_len, dtype=torch.int64)
    return {"tokens": row, "labels": row.clone()}


def samples_of(source: DatasetSource, size: int) -> Any:
    """The first samples of a data set, again from its start if it has fewer."""
    ids = np.arange(size, dtype=np.int64) % source.num_samples
    place = Place(step=0, epoch=0, index=0, ids=ids, read=ids, last=True)
    return next(source.stream(iter([place]))).batch


def seq_len_of(batch_of: Callable[[int], Any]) -> int:
    """Tokens per sample of a data set's microbatches; 1 where a sample is no sequence."""
    batch = batch_of(1)
    ids = batch.get("tokens", batch.get("input_ids")) if isinstance(batch, dict) else None
    return int(ids.shape[1]) if isinstance(ids, torch.Tensor) and ids.ndim == 2 else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m meshwright.train.trace_recipe", description=__doc__)
    parser.add_argument("recipe", metavar="RECIPE.toml")
    parser.add_argument("--out", required=True, metavar="FILE", help="where the model spec is written, as JSON")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="override a key of the recipe")
    parser.add_argument("--kernels", choices=("cuda", "cpu"), default="cuda", help="whose kernels keep what")
    parser.add_argument("--microbatch", type=int, nargs=2, default=MICROBATCHES, metavar="N", help="two sizes to trace")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
