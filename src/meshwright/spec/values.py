"""One value against its type and limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwright.errors import Fault
from meshwright.spec.keys import Key
from meshwright.spec.nearest import closest, shown

LARGEST_INTEGER = 2**63 - 1
TYPE_WORDS = {"str": "a string", "int": "a whole number", "float": "a number", "bool": "true or false"}


def value_fault(where: str, value: Any, kind: str, limits: Key) -> Fault | None:
    """What is wrong with a value; None if nothing is.

    Args:
        where: key path.
        value: as TOML or JSON gave it.
        kind: `str`, `int`, `float` or `bool`. A whole number is a float too; a bool is never a number.
        limits: legal values.
    """
    wrong = _type_fault(where, value, kind)
    if wrong:
        return wrong
    if kind in ("int", "float"):
        return _number_fault(where, value, kind, limits)
    if limits.choices and value not in limits.choices:
        near = closest(value, limits.choices, 0.5)
        rule = f"{shown(value)} is not one of {', '.join(limits.choices)}."
        return Fault(where, rule, f'Nearest: "{near}".' if near else "")
    if kind == "str" and not value:
        return Fault(where, "is empty.", "Leave it out for its default.")
    return None


def converted(value: Any, kind: str) -> Any:
    """A sound value in the type of its key: the int 1 becomes 1.0 where a float is wanted."""
    return float(value) if kind == "float" else value


def _type_fault(where: str, value: Any, kind: str) -> Fault | None:
    right = {
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, (int, float)) and not isinstance(value, bool),
    }
    if right[kind]:
        return None
    return Fault(where, f"is {shown(value)}, {_type_word(value)}; must be {TYPE_WORDS[kind]}.", _respelt(value, kind))


def _type_word(value: Any) -> str:
    words = {
        bool: "a boolean",
        int: "a whole number",
        float: "a float",
        str: "a string",
        list: "a list",
        dict: "a table",
    }
    return words.get(type(value), f"a {type(value).__name__}")


def _respelt(value: Any, kind: str) -> str:
    """The same value in the wanted type, where one can see what was meant."""
    match kind, value:
        case "int", float() if math.isfinite(value):
            near = {math.floor(value), math.ceil(value)}
            return f"Nearest: {' or '.join(str(number) for number in sorted(near))}."
        case "bool", str() if value.lower() in ("true", "false", "yes", "no", "on", "off"):
            return f"Nearest: {shown(value.lower() in ('true', 'yes', 'on'))}."
        case "bool", int() if value in (0, 1):
            return f"Nearest: {shown(bool(value))}."
        case "int" | "float", str():
            return _without_quotes(value, kind)
        case "str", int() | float() if not isinstance(value, bool):
            return f'Nearest: "{shown(value)}".'
    return ""


def _without_quotes(text: str, kind: str) -> str:
    try:
        number = int(text) if kind == "int" else float(text)
    except ValueError:
        return ""
    return f"Nearest: {text.strip()}, without quotes." if math.isfinite(number) else ""


def _number_fault(where: str, value: int | float, kind: str, limits: Key) -> Fault | None:
    if not math.isfinite(value) if isinstance(value, float) else abs(value) > LARGEST_INTEGER:
        rule = "must be finite" if isinstance(value, float) else "TOML integers have 64 bits"
        return Fault(where, f"is {shown(value)}; {rule}.")
    asked = f"is {shown(value)}, must be"
    for limit, broken, word in (
        (limits.least, limits.least is not None and value < limits.least, "at least"),
        (limits.most, limits.most is not None and value > limits.most, "at most"),
        (limits.above, limits.above is not None and value <= limits.above, "above"),
        (limits.below, limits.below is not None and value >= limits.below, "below"),
    ):
        if limit is not None and broken:
            bound = shown(float(limit) if kind == "float" else int(limit))
            near = f"Nearest: {bound}." if word.startswith("at") else ""
            return Fault(where, f"{asked} {word} {bound}.", near)
    return None


def plain_fault(where: str, value: Any) -> Fault | None:
    """What keeps a value of an open table out of TOML or JSON; None if nothing does."""
    match value:
        case bool() | str():
            return None
        case int() | float():
            return _number_fault(where, value, "float", Key(""))
        case list() | tuple():
            faults = (plain_fault(f"{where}[{index}]", item) for index, item in enumerate(value))
        case Mapping():
            faults = (plain_fault(f"{where}.{name}", item) for name, item in value.items())
        case _:
            held = "a recipe holds strings, numbers, booleans, lists and tables"
            return Fault(where, f"is {shown(value)}, a {type(value).__name__}; {held}.", f'Nearest: "{value}".')
    return next((fault for fault in faults if fault), None)
