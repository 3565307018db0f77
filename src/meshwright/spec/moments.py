"""The moments of an optimizer step at which memory is predicted and measured, and the names of what lives through it.

before      between steps, at the start of one: what stays alone
forward     the most while the forward pass of a microbatch runs, up to the start of its backward pass
backward    the most while a backward pass runs
update      the most during clipping and the optimizer's step
after       at the end of the step
"""

from __future__ import annotations

from typing import Final

BEFORE: Final = "before"
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
UPDATE: Final = "update"
AFTER: Final = "after"

MOMENTS: Final = (BEFORE, FORWARD, BACKWARD, UPDATE, AFTER)
"""In the order of a step."""

PARAMETERS: Final = "parameters"
GRADIENTS: Final = "gradients"
OPTIMIZER_STATE: Final = "optimizer_state"
BUFFERS: Final = "buffers"
OTHER: Final = "other"

CATEGORIES: Final = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE, BUFFERS, OTHER)
"""What the memory between steps is told apart by; the first three are also names of an estimate's terms."""
