"""Estimates are sums of named terms, and an explanation is those terms printed: words and numbers cannot drift."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import SpecError
from meshwright.spec.numbers import check_amount

Amount = float | int | str | None
"""What a verdict compares: a number, a digest or a word."""


@dataclass(frozen=True, slots=True)
class Term:
    """One line of an estimate.

    Attributes:
        name: what it is, such as `optimizer_state`.
        amount: how much, >= 0 and finite.
        unit: `bytes` or `s`.
        formula: how it came about, with its numbers in.
        source: where the formula comes from.

    Raises:
        SpecError: the amount is negative or not finite.
    """

    name: str
    amount: float
    unit: str
    formula: str
    source: str

    def __post_init__(self) -> None:
        """Refuse an amount that no sum could contain."""
        check_amount(f"term {self.name}", self.amount)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of one rank at its fullest moment.

    Attributes:
        terms: what lives then, all in bytes.
        moment: which moment that is.
        reserved_bytes: the upper estimate, on which the verdict is made; 0 where none was made.
        capacity_bytes: of the device; 0 where it is not known.
        fits: the verdict.

    Raises:
        SpecError: a term in another unit, or a name twice.
    """

    terms: tuple[Term, ...]
    moment: str = ""
    reserved_bytes: int = 0
    capacity_bytes: int = 0
    fits: Literal["yes", "tight", "no"] = "yes"

    def __post_init__(self) -> None:
        """Refuse terms that do not add up."""
        _check_terms(self.terms, "bytes")

    @property
    def total_bytes(self) -> int:
        """The sum, rounded up to a whole byte."""
        return math.ceil(sum(term.amount for term in self.terms))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of one optimizer step.

    Attributes:
        terms: what takes time and is hidden behind nothing, all in seconds.

    Raises:
        SpecError: a term in another unit, or a name twice.
    """

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        """Refuse terms that do not add up."""
        _check_terms(self.terms, "s")

    @property
    def total_s(self) -> float:
        """The sum in seconds."""
        return math.fsum(term.amount for term in self.terms)


def _check_terms(terms: tuple[Term, ...], unit: str) -> None:
    names = [term.name for term in terms]
    for term in terms:
        if term.unit != unit:
            raise SpecError(f"term {term.name}", f"is in {term.unit}; this sum is in {unit}.")
        if names.count(term.name) > 1:
            raise SpecError(f"term {term.name}", f"stands {names.count(term.name)} times in one estimate; once.")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One checked claim.

    Attributes:
        check: what was checked.
        status: pass, fail, or skip where it could not be checked.
        expected: what the claim says.
        measured: what was found.
        tolerance: how far they may differ; None for not at all.
        because: the reason, in one sentence.
        fix: what to do about a failure; empty for none.
    """

    check: str
    status: Literal["pass", "fail", "skip"]
    expected: Amount = None
    measured: Amount = None
    tolerance: Amount = None
    because: str = ""
    fix: str = ""
