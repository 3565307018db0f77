"""Loss scaling for fp16, whose smallest number is 6e-8: gradients below it would vanish.

The rule is the usual one (Micikevicius et al. 2018, "Mixed precision training", section 3.2; torch's GradScaler has the
same constants): halve on overflow and skip that step, double after 2000 steps without one. It is written out because
GradScaler reads the overflow flag by itself, and a step here reads everything once, for all ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from meshwright.errors import NonFiniteError

GROWTH_INTERVAL: Final = 2000
FIRST_SCALE: Final = 2.0**8
"""The loss is a sum over labels, so its gradient at the logits is of order 1 already; a mean would need 2**16."""


@final
@dataclass(slots=True)
class LossScaler:
    """The factor on the loss before backward; 1 unless the compute type is fp16.

    Attributes:
        enabled: True for fp16.
        scale: the factor now.
        good_steps: steps since the last change.
    """

    enabled: bool
    scale: float = 1.0
    good_steps: int = 0

    def __post_init__(self) -> None:
        if self.enabled and self.scale == 1.0:
            self.scale = FIRST_SCALE

    def overflowed(self) -> None:
        """Halve the scale.

        Raises:
            NonFiniteError: the scale is so small that the gradients themselves cannot be finite.
        """
        self.scale, self.good_steps = self.scale / 2, 0
        if self.scale < 2.0**-24:
            raise NonFiniteError(
                "fp16 loss scaling",
                f"fell to {self.scale:g} and gradients still overflow.",
                'Use precision.compute = "bf16" or "fp32".',
            )

    def succeeded(self) -> None:
        """Count a good step; double the scale after GROWTH_INTERVAL of them."""
        self.good_steps += 1
        if self.enabled and self.good_steps >= GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0
