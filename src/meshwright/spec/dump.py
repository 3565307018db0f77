"""A Recipe back into a table or TOML text; what is read from either equals what was written."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.spec.recipe import Recipe
from meshwright.spec.sections import KEYS_OF_OTHER_MODELS, DataSection, ModelSection, OptimizerSection, Section


def to_table(recipe: Recipe) -> dict[str, Any]:
    """The recipe as nested dicts, lists, strings, numbers and booleans: TOML-able and JSON-able.

    Every key stands at its resolved value. Left out is what is None, and what means nothing beside the section's other
    keys (`model.rope_theta` of a gpt2) and would be refused. Open tables are merged into their section.
    """
    sections = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    return {name: table for name, section in sections.items() if (table := _section_table(section))}


def to_toml(recipe: Recipe) -> str:
    """The recipe as the text of a TOML file, every key written out; see `to_table`."""
    import tomli_w  # Only writing a recipe needs it.

    return tomli_w.dumps(to_table(recipe))


def _section_table(section: Section) -> dict[str, Any]:
    meaningless = _meaningless(section)
    table: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if field.metadata.get("open"):
            table |= _copied(value)
        elif value is not None and value != () and field.name not in meaningless:
            table[field.name] = _copied(value)
    return table


def _meaningless(section: Section) -> tuple[str, ...]:
    """Keys whose defaults mean nothing in this section, and which loading refuses."""
    match section:
        case ModelSection(name=str(name)):
            return KEYS_OF_OTHER_MODELS[name]
        case ModelSection():
            return tuple(f.name for f in dataclasses.fields(section) if f.name not in ("hf", "build", "arguments"))
        case DataSection(source=source) if source != "tokens":
            return ("token_dtype",)
        case OptimizerSection(build=str()):
            return ("name",)
        case _:
            return ()


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, (list, tuple)) else value
