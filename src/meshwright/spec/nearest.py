"""The nearest thing that works: words by likeness, numbers by ratio. Every refusal ends with one of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def closest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice most like `word`, case ignored; None if none is at least `cutoff` alike (difflib's ratio, 0 to 1)."""
    from difflib import get_close_matches  # Only a refusal needs it.

    by_lower = {choice.lower(): choice for choice in choices}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def divisors(number: int) -> list[int]:
    """Every divisor of a whole number >= 1, ascending."""
    small, large, candidate = [], [], 1
    # Past a million the list is only material for a hint: its small divisors and their partners are enough.
    while candidate * candidate <= number and candidate <= 1_000_000:
        if number % candidate == 0:
            small.append(candidate)
            if candidate * candidate != number:
                large.append(number // candidate)
        candidate += 1
    return small + large[::-1]


def around(wanted: int, legal: Sequence[int]) -> list[int]:
    """The largest legal number below `wanted` and the smallest above it, as far as they exist; `legal` is ascending."""
    below = [number for number in legal if number < wanted][-1:]
    above = [number for number in legal if number > wanted][:1]
    return below + above


def multiples_around(wanted: int, unit: int) -> list[int]:
    """The positive multiples of `unit` just below and just above `wanted`, which is none itself."""
    below = wanted // unit * unit
    return [number for number in (below, below + unit) if number > 0]


def listed(items: Iterable[object], word: str = "or") -> str:
    """`a`, `a or b`, `a, b or c`."""
    words = [str(item) for item in items]
    return f" {word} ".join([part for part in (", ".join(words[:-1]), words[-1]) if part]) if words else ""


def first_of(names: Sequence[str], limit: int = 4) -> str:
    """The first names, and how many more there are: `a, b, c, d and 3 more`."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def shown(value: object, limit: int = 60) -> str:
    """A value as TOML spells it, cut after `limit` characters."""
    match value:
        case bool():
            text = "true" if value else "false"
        case str():
            text = '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
        case list() | tuple():
            text = "[" + ", ".join(shown(item, limit) for item in value) + "]"
        case dict():
            text = "{" + ", ".join(f"{name} = {shown(item, limit)}" for name, item in value.items()) + "}"
        case float():
            text = f"{value:.12g}"
            text = text if any(mark in text for mark in ".eni") else f"{text}.0"
        case int() if value.bit_length() > 512:
            text = f"a number of {value.bit_length()} bits"  # Python refuses to print past 4300 digits.
        case _:
            text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
