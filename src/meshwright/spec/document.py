"""`docs/recipe.md` from the code: `python -m meshwright.spec.document > docs/recipe.md`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.spec.hints import sections
from meshwright.spec.keys import Key, about
from meshwright.spec.nearest import shown
from meshwright.spec.optimizers import OPTIMIZERS, REFUSED, Optimizer, Option
from meshwright.spec.tables import kind_of

TYPES = {"str": "string", "int": "whole number", "float": "number", "bool": "true or false", "Table": "table"}

HEAD = """# The recipe

<!-- Made by `python -m meshwright.spec.document > docs/recipe.md`; change the code, not this page. -->

A recipe is one TOML file that says everything about a run. Required are a model (`name`, `hf` or `build`),
`batch.global_batch_size`, `optimizer.lr` and `train.steps`. A file is checked as a whole: every fault is named at once,
with its key, the rule with its numbers and the nearest thing that works. An unknown key is a fault.

`--set key=value` overrides a key, such as `--set optimizer.lr=3e-4`. The value is TOML; what does not parse is a
string. `--set layout=zero3x4` replaces the degrees of the whole layout; a file may say `layout = "zero3x4"` too.

A whole number will do where a number is asked for; NaN and infinity will not. The column *resume* says whether the key
may differ when a run is resumed: *yes* for what says how the training runs, *no* for what is trained.
"""


def recipe_markdown() -> str:
    """The page: every section with its keys, then the optimizers."""
    parts = [HEAD, *(_section(name, section) for name, section in sections().items()), _optimizers()]
    return "\n".join(parts)


def _section(name: str, section: type) -> str:
    title, _, text = (section.__doc__ or "").partition(": ")
    keys = [field for field in dataclasses.fields(section) if not field.metadata.get("open")]
    opened = [field for field in dataclasses.fields(section) if field.metadata.get("open")]
    rows = [_key_row(field) for field in keys]
    rows += [("other keys", "", "", "", about(field).meaning, _resume(about(field))) for field in opened]
    table = _table(("key", "type", "left out", "limits", "meaning", "resume"), rows)
    return f"## {title}\n\n{text[:1].upper()}{text[1:]}\n\n{table}"


def _key_row(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    known = about(field)
    kind = kind_of(field)
    word = "list of tables" if field.name == "groups" else TYPES[kind]
    return (f"`{field.name}`", word, _left_out(field), limits_text(known), known.meaning, _resume(known))


def _left_out(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "**required**"
    if about(field).left_out:
        return about(field).left_out
    return "" if field.default in (None, ()) else f"`{shown(field.default)}`"


def _resume(known: Key) -> str:
    return "yes" if known.knob else "no"


def limits_text(limits: Key) -> str:
    """Legal values in words: `at least 1`, `one of a, b`; empty for any."""
    words = (("at least", limits.least), ("above", limits.above), ("at most", limits.most), ("below", limits.below))
    spelt = [f"{word} {bound:g}" for word, bound in words if bound is not None]
    words_of_choice = ", ".join(f"`{word}`" for word in limits.choices)
    return ", ".join(spelt) or (f"one of {words_of_choice}" if limits.choices else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _optimizers() -> str:
    refused = "\n".join(f"* `{name}` is refused: it {why}" for name, why in REFUSED.items())
    text = f"""## The optimizers

Names for `optimizer.name`, and the options that may stand beside it or in a table of `optimizer.groups` (there also
`lr`, but not `foreach` and `fused`, which choose the kernel of the whole optimizer). Defaults are torch's, but for
`fused`: true where torch has the kernel for CPUs too, unless `foreach` is on, or `train.reduction` is exact with
several threads a rank: the last bit of a fused step tells where a thread's share ends.

{refused}
* `lbfgs` is left out: it needs a closure that calls the model several times a step.
* `adafactor` factors the moments of whole matrices, so it is refused where `dp_shard` cuts them.
* With `train.reduction` exact an update must be elementwise: `adafactor`, `muon` and your own `build` are refused.
* `muon` takes 2-D parameters alone, so it is refused for the reference models, whose norms are 1-D.
"""
    rows = [row for name, known in OPTIMIZERS.items() for row in _optimizer_rows(name, known)]
    return f"{text}\n{_table(('name', 'option', 'type', 'default', 'limits'), rows)}"


def _optimizer_rows(name: str, known: Optimizer) -> Iterator[tuple[str, ...]]:
    first = f"`{name}` (`torch.optim.{known.torch_name}`)"
    for index, (key, option) in enumerate(known.options.items()):
        kind = f"list of {option.items} numbers" if option.items else TYPES[option.kind]
        limits = limits_text(option.limits)
        yield (first if index == 0 else "", f"`{key}`", kind, _default(option), limits)


def _default(option: Option) -> str:
    parts = option.default if option.items else (option.default,)
    return "torch decides" if None in parts else f"`{shown(option.default)}`"


if __name__ == "__main__":
    print(recipe_markdown(), end="")
