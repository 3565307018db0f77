"""The grid of exact mode: for each parameter a power of two whose multiples its gradients are rounded to.

Sums of multiples of a unit u are exact in fp64 while they stay below 2**53 u: nothing is rounded, so the order of
summation, and with it the number of ranks, does not matter. The unit follows the gradients. It is 2**-bits of the power
of two above the largest one of the last step (a maximum has no order either), and a step is computed again on a new
grid if its own largest gradient turns out

    too large   sums of all its microbatches might reach 2**53 u
    too small   less than 2**30 units, so that rounding might show in fp32, which has 24 bits

`bits` puts the last step's maximum in the middle between the two, so gradients may grow and shrink by a factor of about
2**((21 - log2(microbatches)) / 2) from step to step before that happens: 500 for 8 microbatches, 50 for 1024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, final

from meshwright.errors import SpecError

SIGNIFICAND: Final = 53
"""Bits of an fp64 number."""

RESOLUTION: Final = 30
"""The unit is at most 2**-30 of a step's largest gradient."""

_ROUNDS_BELOW: Final = 51
"""Adding and subtracting 1.5 x 2**52 u rounds to the nearest multiple of u whatever is below 2**51 u."""

LARGEST: Final = 2.0**960
"""Gradients beyond are as good as infinite: their sums, and what rounds them, would leave the range of fp64."""

LEAST_EXPONENT: Final = -960
"""Gradients below all share one grid, whose unit fp64 can still hold."""

MOST_MICROBATCHES: Final = 1 << 16

FIRST: Final = "the grid of exact mode is taken from the first gradients"
"""Why the first step of every training is computed twice."""


def require_few(num_microbatches: int, uses: int) -> int:
    """Addends of a sum over a step: of microbatches, and of the modules that share a parameter.

    Args:
        num_microbatches: of a step, all ranks together.
        uses: the most modules that share one parameter.

    Raises:
        SpecError: more than can be summed exactly.
    """
    addends, most = num_microbatches * uses, MOST_MICROBATCHES // uses
    if addends > MOST_MICROBATCHES:
        rule = f"makes {num_microbatches} microbatches a step, and {uses} modules share a parameter (a tied table): "
        rule += f"sums of {addends} gradients, more than {MOST_MICROBATCHES}, would not be exact."
        raise SpecError("train.reduction = exact", rule, f"Nearest: larger microbatches, at most {most} of them.")
    return addends


@final
class Grid:
    """Units of all parameters.

    Args:
        names: of the parameters, for messages.
        num_microbatches: of a step, all ranks together.
    """

    def __init__(self, names: Sequence[str], num_microbatches: int) -> None:
        assert 1 <= num_microbatches <= MOST_MICROBATCHES, num_microbatches
        self.names = list(names)
        self.exponents: list[int | None] = [None] * len(self.names)
        """For each parameter e, with 2**(e-1) <= its largest gradient < 2**e; None before it had one."""
        self._room = min(SIGNIFICAND - math.ceil(math.log2(num_microbatches)), _ROUNDS_BELOW)
        self.bits = RESOLUTION + 1 + (self._room - RESOLUTION - 1) // 2

    def shift(self, number: int) -> float | None:
        """What to add to a gradient and to subtract again; None before the parameter has a grid."""
        exponent = self.exponents[number]
        return None if exponent is None else math.ldexp(1.5, 52 + exponent - self.bits)

    def unit(self, number: int) -> float | None:
        """The unit of a parameter."""
        exponent = self.exponents[number]
        return None if exponent is None else math.ldexp(1.0, exponent - self.bits)

    def outside(self, peaks: Sequence[float]) -> list[int]:
        """Numbers of the parameters whose largest gradient does not fit the grid that it was rounded to.

        Args:
            peaks: largest magnitude of each over all microbatches; -1 where none had a gradient.
        """
        return [i for i, peak in enumerate(peaks) if peak > 0 and not self._fits(i, peak)]

    def _fits(self, number: int, peak: float) -> bool:
        exponent = self.exponents[number]
        if exponent is None:
            return False
        steps = _exponent(peak) - (exponent - self.bits)  # peak < 2**steps units
        return RESOLUTION + 1 <= steps <= self._room

    def follow(self, peaks: Sequence[float]) -> None:
        """Make the grid that of these gradients."""
        for number, peak in enumerate(peaks):
            if peak > 0:
                self.exponents[number] = _exponent(peak)

    def told(self, peaks: Sequence[float], outside: Sequence[int]) -> str:
        """Why a step is computed again, in words."""
        number = outside[0]
        name, peak, unit = self.names[number], peaks[number], self.unit(number)
        more = f" (and {len(outside) - 1} more)" if len(outside) > 1 else ""
        if all(exponent is None for exponent in self.exponents):
            return FIRST
        if unit is None:
            return f"{name}{more} has a gradient for the first time, of at most {peak:.3g}"
        limit = f"2**{RESOLUTION} units" if peak < math.ldexp(unit, self._room) else f"2**{self._room} units"
        side = "below" if peak < math.ldexp(unit, self._room) else "above"
        return f"the largest gradient of {name}{more} is {peak:.3g}, {side} {limit} of {unit:.3g}"

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {n: e for n, e in zip(self.names, self.exponents, strict=True) if e is not None}

    def load(self, state: dict[str, int]) -> None:
        """Put back what `state` gave."""
        self.exponents = [state.get(name) for name in self.names]


def _exponent(peak: float) -> int:
    """e, with 2**(e-1) <= peak < 2**e, but not less than all can have."""
    return max(math.frexp(peak)[1], LEAST_EXPONENT)
