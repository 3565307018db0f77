"""A recipe file into a Recipe, or a SpecError with every fault of the file at once.

Hand-written on the section dataclasses. Validation libraries were measured (import over bare python, CPU time):
pydantic 0.10 s, msgspec 0.07 s, attrs 0.06 s, cattrs 0.08 s, against 0.02 s for tomllib; msgspec stops at the first
fault besides. And the part that helps a user, the nearest thing that works, would have to be written in any case.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from meshwright.errors import Fault, LayoutError, SpecError
from meshwright.spec.layout import parse_layout
from meshwright.spec.nearest import closest, shown
from meshwright.spec.recipe import Recipe
from meshwright.spec.rules import broken_rules
from meshwright.spec.tables import read


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file.

    Args:
        path: a TOML file, UTF-8.
        overrides: `key=value` each, as given to `--set`: a dotted key path, and a value that is TOML, or a string if
            it does not parse. `layout=zero3x4` replaces the degrees of the whole layout.

    Raises:
        SpecError: the file cannot be read, is not TOML, or describes no run; `faults` holds everything that is wrong.
    """
    return loads(_text(os.fspath(path)), overrides, where=os.fspath(path))


def loads(text: str, overrides: Sequence[str] = (), where: str = "recipe") -> Recipe:
    """Read a recipe from TOML text; `where` names it in messages. Arguments and errors otherwise as for `load`."""
    table = _toml(text, where)
    faults = [fault for override in overrides for fault in _override(table, override)]
    return _made(table, where, faults)


def from_table(table: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Check a table of sections, as from TOML or JSON, and make it a Recipe.

    Raises:
        SpecError: it describes no run; `faults` holds everything that is wrong.
    """
    return _made(table, where, [])


def _made(table: Mapping[str, Any], where: str, faults: Sequence[Fault]) -> Recipe:
    reading = read(table)
    faults = [*faults, *reading.faults, *broken_rules(reading)]
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise SpecError(where, "\n  ".join([count, *map(str, faults)]), faults=faults)
    return reading.recipe


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read()
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise SpecError(path, "there is no such file.", _nearest_file(path)) from None
    except IsADirectoryError:
        raise SpecError(path, "is a folder; a recipe is one TOML file.", _recipes_in(path)) from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        rule = f"is not UTF-8: byte {raw[error.start]:#04x} at line {line}, column {column}."
        raise SpecError(path, rule, "Save it as UTF-8.") from None
    except OSError as error:
        raise SpecError(path, f"cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise SpecError(shown(path), f"is no path: {error}.") from None


def _nearest_file(path: str) -> str:
    folder, name = os.path.split(path)
    try:
        near = closest(name, os.listdir(folder or "."))
    except OSError:
        return f"Nor is there a folder {folder}."
    return f"Nearest: {os.path.join(folder, near)}." if near else ""


def _recipes_in(folder: str) -> str:
    found = sorted(name for name in os.listdir(folder) if name.endswith(".toml"))[:3]
    return f"It holds {', '.join(found)}." if found else ""


def _toml(text: str, where: str) -> dict[str, Any]:
    import tomllib  # 0.02 s that only reading a file should pay.

    try:
        return tomllib.loads(text)
    except RecursionError:
        raise SpecError(where, "is not TOML that can be read: it is nested too deeply.") from None
    except ValueError as error:
        raise SpecError(where, f"is not TOML: {error}.", _line_of(text, str(error))) from None


def _line_of(text: str, message: str) -> str:
    """The line that tomllib complains about, for a reader who does not want to count."""
    _, _, place = message.partition("(at line ")
    number = place.split(",")[0]
    lines = text.splitlines()
    if number.isdecimal() and int(number) <= len(lines):
        return f"There: {shown(lines[int(number) - 1].strip())}"
    return ""


def _override(table: dict[str, Any], override: str) -> list[Fault]:
    """Set one `key=value` in the table; what cannot be set comes back."""
    path, equals, text = override.partition("=")
    names = [name.strip() for name in path.split(".")]
    asked = f"--set {override}"
    if not equals or not all(names):
        return [Fault(asked, "must be key=value, the key a dotted path.", "Such as optimizer.lr=1e-3.")]
    value = _value(text.strip())
    if names == ["layout"] and isinstance(value, str):
        return _layout_word(table, value)
    at: Any = table
    for depth, name in enumerate(names[:-1]):
        at = at.setdefault(name, {})
        if not isinstance(at, dict):
            inside = ".".join(names[: depth + 1])
            return [Fault(asked, f"{inside} is {shown(at)}, not a table.", f"Set {inside} as a whole.")]
    at[names[-1]] = value
    return []


def _value(text: str) -> Any:
    import tomllib

    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _layout_word(table: dict[str, Any], word: str) -> list[Fault]:
    """Put the degrees of a layout word in place of those given; the other keys of the section stay."""
    try:
        degrees = asdict(parse_layout(word))
    except LayoutError as error:
        return [Fault(error.asked, error.rule, error.nearest)]
    before = table.get("layout")
    kept = {name: value for name, value in before.items() if name not in degrees} if isinstance(before, dict) else {}
    table["layout"] = kept | degrees
    return []
