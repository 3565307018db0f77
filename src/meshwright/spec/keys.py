"""How a recipe key is declared: its meaning, default and limits stand beside the field, and nowhere else.

The loader checks against this, `docs/recipe.md` is printed from it, and resuming asks it whether a key may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Key:
    """What is known about one key besides its type and default.

    Attributes:
        meaning: one sentence for the docs.
        least: smallest legal number, inclusive.
        above: the number must be greater than this.
        most: largest legal number, inclusive.
        below: the number must be smaller than this.
        choices: legal words; empty means any.
        knob: True if it may change on resume: it says how the training runs, not what is trained.
        left_out: what happens when the key is left out, where the default alone does not say it.
    """

    meaning: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    knob: bool = False
    left_out: str = ""
    below: float | None = None


def key(
    meaning: str,
    default: Any = dataclasses.MISSING,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    knob: bool = False,
    left_out: str = "",
) -> Any:
    """Declare a dataclass field as a recipe key; see `Key` for the arguments. No default makes it required."""
    declared = Key(meaning, least, above, most, choices, knob, left_out, below)
    return dataclasses.field(default=default, metadata={"key": declared})


def open_table(meaning: str) -> Any:
    """Declare the field that receives every key of the section's table that is not declared."""
    return dataclasses.field(default_factory=dict, metadata={"key": Key(meaning), "open": True})


def about(field: dataclasses.Field[Any]) -> Key:
    """The `Key` that a field was declared with."""
    found: Key = field.metadata["key"]
    return found


Table = Mapping[str, Any]
"""A TOML table: keys to strings, numbers, booleans, arrays or further tables."""
