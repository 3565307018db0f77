"""`meshwright plan`: choose a layout and say why. Free of torch: a module of your own is traced in a child process."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from meshwright.errors import CatalogError, SpecError
from meshwright.plan.option import Option
from meshwright.plan.plan import Plan, make_plan, require_chosen
from meshwright.plan.workload import request_of
from meshwright.spec.catalogue import decoder_of_shape, find_model
from meshwright.spec.cluster import Cluster
from meshwright.spec.decoder import DecoderSpec
from meshwright.spec.find_cluster import cluster_of_section, find_cluster
from meshwright.spec.load import load, loads
from meshwright.spec.model_spec import ModelSpec
from meshwright.spec.recipe import Recipe

Kernels = Literal["cuda", "cpu"]
"""Whose kernels a trace counts."""

SEQ_LEN: Final = 4096
GLOBAL_BATCH_SIZE: Final = 1024
WITHOUT_RECIPE: Final[Mapping[str, Any]] = {
    "batch.global_batch_size": GLOBAL_BATCH_SIZE,
    "precision.compute": "bf16",
    "optimizer.name": "adamw",
}
"""What is assumed where no recipe says it, and said in the output; `data.seq_len` besides."""

PLACEHOLDERS: Final[Mapping[str, Any]] = {"optimizer.lr": 3e-4, "train.steps": 1000}
"""Required keys of a recipe that no plan depends on."""


@dataclass(frozen=True, slots=True)
class Task:
    """What the command line asks for, read.

    Attributes:
        recipe: the run.
        cluster: what it is to run on.
        model: its architecture, or its trace.
        given: key paths that the user wrote, in the file or with --set.
        lines: what was assumed.
    """

    recipe: Recipe
    cluster: Cluster
    model: DecoderSpec | ModelSpec
    given: frozenset[str]
    lines: tuple[str, ...]


def plan(options: argparse.Namespace) -> int:
    """Plan what `options` names; returns the exit code.

    Args:
        options: `recipe` or `model` (exactly one), `cluster`, `set`, `layouts`, `states`, `json`, `save`, `top`.

    Raises:
        NoFeasibleLayout: nothing fits; the plan has been printed all the same.
        SpecError: a wrong description.
    """
    if options.top < 1:
        raise SpecError(f"--top {options.top}", "is no number of candidates.", "Nearest: 1.")
    task = _task_of_recipe(options) if options.recipe else _task_of_model(options)
    made = make_plan(
        request_of(
            task.recipe,
            task.cluster,
            task.model,
            given=task.given,
            states=_states(options.states),
            layouts=_words(options.layouts),
            lines=task.lines,
            fused=not options.recipe,
            top=options.top,
        )
    )
    _print(made, options.json)
    chosen = require_chosen(made)
    if options.save:
        _save(task, made.runnable or chosen, Path(options.save), sys.stderr if options.json else sys.stdout)
    return 0


def _print(made: Plan, as_json: bool) -> None:
    if as_json:
        from meshwright.report.plan_json import plan_document

        print(json.dumps(plan_document(made), indent=1))
        return
    from meshwright.report.plan_text import plan_lines

    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        "\N{FULL BLOCK}".encode(encoding)
        ascii_only = False
    except UnicodeEncodeError:
        ascii_only = True
    print("\n".join(plan_lines(made, ascii_only=ascii_only)))


def _states(name: str | None) -> Any:
    if name is None:
        return None
    from meshwright.cost.states import find_states

    return find_states(name)


def _words(text: str | None) -> tuple[str, ...]:
    words = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    if text is not None and not words:
        raise SpecError("--layouts", "names no layout.", "Such as --layouts zero1x8,zero3x8.")
    return words


def _keys_of(overrides: Sequence[str]) -> set[str]:
    return {override.partition("=")[0].strip() for override in overrides}


def _task_of_recipe(options: argparse.Namespace) -> Task:
    """Read a recipe file."""
    if options.model:
        rule = "stands beside a recipe, which has a model of its own."
        raise SpecError(f"--model {options.model}", rule, "Leave one of the two out.")
    recipe = load(options.recipe, options.set)
    cluster = find_cluster(options.cluster) if options.cluster else cluster_of_section(recipe.cluster)
    kernels: Kernels = "cpu" if cluster.device.kind == "cpu" else "cuda"
    model = model_of_recipe(recipe, options.recipe, options.set, kernels=kernels)
    return Task(recipe, cluster, model, given_keys(options.recipe, options.set), ())


def given_keys(path: str, overrides: Sequence[str]) -> frozenset[str]:
    """Key paths that a recipe's file and its overrides write out; it has been read once without fault."""
    return frozenset(_keys_in(path) | _keys_of(overrides))


def _keys_in(path: str) -> set[str]:
    import tomllib

    table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    return {f"{name}.{key}" for name, section in table.items() if isinstance(section, dict) for key in section}


def model_of_recipe(
    recipe: Recipe, path: str, overrides: Sequence[str] = (), *, kernels: Kernels = "cuda"
) -> DecoderSpec | ModelSpec:
    """The architecture of a recipe's model.

    A module of your own is traced in a child process, and so is a Hugging Face model of a family that is not known.

    Args:
        recipe: as read.
        path: of its file, for the child process.
        overrides: that were given with it.
        kernels: whose a trace counts.

    Raises:
        SpecError: the model cannot be found or traced.
    """
    if recipe.model.name:
        from meshwright.spec.shape import resolve_shape

        return decoder_of_shape(resolve_shape(recipe.model, recipe.data.seq_len, _vocabulary(recipe)))
    if recipe.model.hf:
        try:
            return find_model(recipe.model.hf)
        except CatalogError:
            if not Path(recipe.model.hf).is_dir():
                raise
    from meshwright.plan.ask_trace import trace_in_child

    return trace_in_child(path, overrides, kernels=kernels)


def _vocabulary(recipe: Recipe) -> int | None:
    """Ids that the tokenizer can produce; None where the data does not say."""
    data = recipe.data
    if data.build or data.source == "tokens":
        return None
    if data.tokenizer in (None, "bytes"):
        return 256
    from meshwright.train.tokenizer import load_tokenizer

    return load_tokenizer(data.tokenizer).vocab_size


def _task_of_model(options: argparse.Namespace) -> Task:
    """A model and a cluster without a recipe: the rest is assumed, and said."""
    for name in ("model", "cluster"):
        if not getattr(options, name):
            rule = "is required where no recipe is given."
            raise SpecError(f"--{name}", rule, "Such as --model llama-3.1-8b --cluster 8xH100-SXM.")
    decoder = find_model(options.model)
    assumed = {"data.seq_len": min(SEQ_LEN, decoder.max_seq_len or SEQ_LEN), **WITHOUT_RECIPE}
    given = frozenset(_keys_of(options.set))
    recipe = loads(_base(options.model, assumed), options.set, where="--set")
    words = [f"{key} {value}" for key, value in assumed.items() if key not in given]
    line = f"assumed: {', '.join(words)}; change with --set KEY=VALUE"
    return Task(recipe, find_cluster(options.cluster), decoder, given, (line,) if words else ())


def _base(model: str, assumed: Mapping[str, Any]) -> str:
    """A recipe of what is assumed; the model's name stands for it."""
    sections: dict[str, dict[str, Any]] = {"model": {"hf": model}}
    for path, value in {**assumed, **PLACEHOLDERS}.items():
        section, _, key = path.partition(".")
        sections.setdefault(section, {})[key] = value
    lines = (
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())])
        for name, table in sections.items()
    )
    return "\n".join(lines)


def _save(task: Task, chosen: Option, file: Path, out: Any) -> None:
    """Write a recipe of a candidate, and say what it lacks."""
    from meshwright.plan.save import missing_lines, planned_recipe, reference_section
    from meshwright.spec.dump import to_toml

    recipe = planned_recipe(task.recipe, chosen.candidate, task.cluster)
    if recipe.model.hf and isinstance(task.model, DecoderSpec) and "model.hf" not in task.given:
        section = reference_section(task.model)
        recipe = replace(recipe, model=section) if section else recipe
    missing = missing_lines(recipe, chosen, task.given)
    text = "".join(f"# missing: {line}\n" for line in missing) + to_toml(recipe)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise SpecError(f"--save {file}", "exists already.", "Name a new file.") from None
    except OSError as error:
        raise SpecError(f"--save {file}", f"cannot be written: {error.strerror}.") from None
    print(f"\nsaved: {file}: {chosen.phrase}", *(f"  missing: {line}" for line in missing), sep="\n", file=out)
