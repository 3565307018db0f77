"""The one rule for physical amounts."""

from __future__ import annotations

import math

from meshwright.errors import SpecError


def check_amount(where: str, amount: float, positive: bool = False) -> None:
    """Refuse an amount that is NaN, infinite or negative, or 0 if it must be positive.

    Raises:
        SpecError: it is one of these; `where` names it.
    """
    if not math.isfinite(amount):
        raise SpecError(where, f"is {amount}; an amount is finite.")
    if amount < 0 or (positive and amount == 0):
        raise SpecError(where, f"is {amount}; must be {'above' if positive else 'at least'} 0.")
