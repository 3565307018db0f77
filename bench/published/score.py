"""Predictions -> how good they are: errors by source, goals, misses with their reasons."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from published.fits import is_fit_row
from published.predict import Prediction, predict
from published.rows import Row
from published.unscored import reason

KNOWN_MISSES: Final = {
    "megatron-ci-065": "another branch of the program takes 1.65 GiB for the same test on this board (megatron-ci-136)",
}
"""Rows that miss a goal, with the reason. Any other row that misses one fails `make validate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The rows of one source and one grade of trust.

    Attributes:
        source_key: of the rows.
        trust: A | B | C.
        errors: signed, of the rows that are scored and ran.
        experiments: among these; sources print one figure for runs that differ in the number of microbatches only.
        verdicts: yes, tight and no among the rows that ran.
        ran_called_no: rows that ran, with the verdict no.
        oom_called_yes: rows that ran out of memory, with the verdict yes.
        oom: rows that ran out of memory.
    """

    source_key: str
    trust: str
    errors: tuple[float, ...]
    experiments: int
    verdicts: dict[str, int]
    ran_called_no: int
    oom_called_yes: int
    oom: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One claim about the rows of trust A.

    Attributes:
        name: in words.
        limit: the most that `found` may be.
        found: over the rows that are not known misses.
        rows: how many it speaks of.
        misses: ids of the rows that break it, known ones left out.
    """

    name: str
    limit: float
    found: float
    rows: int
    misses: tuple[str, ...]

    @property
    def is_met(self) -> bool:
        """Does it hold?"""
        return self.found <= self.limit


def predictions_of(rows: Iterable[Row]) -> tuple[Prediction, ...]:
    """Of all rows that can be scored, fitted ones too."""
    return tuple(predict(row) for row in rows if reason(row) is None)


def scored(predictions: Iterable[Prediction]) -> tuple[Prediction, ...]:
    """Those on which nothing was fitted."""
    return tuple(one for one in predictions if not is_fit_row(one.row.id))


def summaries(predictions: Sequence[Prediction]) -> list[Summary]:
    """One for each source and grade, in the order of the file."""
    keys = dict.fromkeys((one.row.source_key, one.row.trust) for one in predictions)
    return [_summary(key, [one for one in predictions if (one.row.source_key, one.row.trust) == key]) for key in keys]


def _summary(key: tuple[str, str], group: list[Prediction]) -> Summary:
    ran, oom = [one for one in group if not one.row.is_oom], [one for one in group if one.row.is_oom]
    known = [one for one in ran if one.capacity_gib]
    verdicts = {name: sum(one.fits == name for one in known) for name in ("yes", "tight", "no")}
    return Summary(
        source_key=key[0],
        trust=key[1],
        errors=tuple(one.error for one in ran if one.error is not None),
        experiments=len({one.row.experiment for one in ran}),
        verdicts=verdicts,
        ran_called_no=verdicts["no"],
        oom_called_yes=sum(one.fits == "yes" for one in oom),
        oom=len(oom),
    )


def goals(predictions: Sequence[Prediction]) -> list[Goal]:
    """The goals on the rows of trust A."""
    trusted = [one for one in predictions if one.row.trust == "A" and one.row.id not in KNOWN_MISSES]
    flat = [one for one in trusted if one.row.is_one_dimensional and one.error is not None]
    cut = [one for one in trusted if not one.row.is_one_dimensional and one.error is not None]
    ran, oom = [one for one in trusted if not one.row.is_oom], [one for one in trusted if one.row.is_oom]
    middle = statistics.median(abs(one.error or 0.0) for one in flat)
    return [
        Goal(name="data parallel only, median error", limit=0.05, found=middle, rows=len(flat), misses=()),
        _largest("data parallel only, largest error", 0.10, flat),
        _largest("tensor or pipeline parallel, largest error", 0.15, cut),
        _none("ran, and called no", ran, "no"),
        _none("out of memory, and called yes", oom, "yes"),
    ]


def _largest(name: str, limit: float, group: list[Prediction]) -> Goal:
    found = max((abs(one.error or 0.0) for one in group), default=0.0)
    misses = tuple(one.row.id for one in group if abs(one.error or 0.0) > limit)
    return Goal(name=name, limit=limit, found=found, rows=len(group), misses=misses)


def _none(name: str, group: list[Prediction], wrong: str) -> Goal:
    misses = tuple(one.row.id for one in group if one.fits == wrong)
    return Goal(name=name, limit=0, found=len(misses), rows=len(group), misses=misses)
