"""Layouts by their words, cp and ep among them: `--layouts zero1x8,zero3x16+tp8+cp2`."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import LayoutError
from meshwright.plan.space import Cut
from meshwright.spec.layout import parse_layout


def named_cuts(words: Sequence[str]) -> list[Cut]:
    """The degrees of each word, in order and each once.

    Raises:
        LayoutError: no layout word, or cp or ep of less than 2.
    """
    return list(dict.fromkeys(_cut(word) for word in words))


def _cut(word: str) -> Cut:
    parts = [part.strip() for part in word.strip().lower().split("+")]
    planned = [part for part in parts if part[:2] in ("cp", "ep") and part[2:].isdecimal()]
    rest = [part for part in parts if part not in planned]
    degrees = {part[:2]: int(part[2:]) for part in planned}
    small = next((part for part in planned if int(part[2:]) < 2), None)
    if small is not None or len(degrees) < len(planned):
        asked = f'layout "{word}"'
        raise LayoutError(asked, "cp and ep stand once each, with a degree of at least 2.", "Leave out what is 1.")
    layout = parse_layout("+".join(rest) if rest else "single")
    return (
        layout.dp_replicate,
        layout.dp_shard,
        layout.zero_stage,
        layout.tp,
        layout.pp,
        degrees.get("cp", 1),
        degrees.get("ep", 1),
    )
