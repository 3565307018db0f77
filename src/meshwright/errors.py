"""Every error meshwright raises on purpose.

    MeshwrightError
    |- SpecError (ValueError)          a description is wrong by itself                  exit 2
    |  |- LayoutError                  degrees do not multiply, divide or fit together
    |  |- BatchError                   the batch identity has no whole solution
    |  `- CatalogError                 an unknown model or device; names the nearest
    |- NoFeasibleLayout                nothing fits; carries the rejections              exit 3
    |- RunError (RuntimeError)         a run failed                                      exit 4
    |  |- MeshMismatch                 the launched world is not the layout's
    |  |- RankDied                     a rank died, hung or was stopped
    |  |- RankDisagreement             ranks hold different weights, buffers or recipes
    |  |- NonFiniteError               a loss or gradient norm is NaN or infinite
    |  `- DataError                    data is missing or unreadable, or rows do not fit
    |- CheckpointError (OSError)       a checkpoint cannot be read or written            exit 5
    `- Interrupted                     the user pressed Ctrl-C                           exit 130

Anything else that escapes is our own bug: exit 70. What should be known but stops nothing is a `MeshwrightWarning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong in a description, found before anything runs.

    Attributes:
        where: key path (`batch.global_batch_size`), or what else was asked.
        rule: the rule that broke, with its numbers.
        nearest: the nearest thing that works; empty if there is none.
    """

    where: str
    rule: str
    nearest: str = ""

    def __str__(self) -> str:
        tail = f" {self.nearest}" if self.nearest else ""
        return f"{self.where}: {self.rule}{tail}"


class MeshwrightError(Exception):
    """Root of the tree. A message says what was asked, the rule with its numbers, and the nearest that works."""

    exit_code = 70

    def __init__(self, asked: str, rule: str = "", nearest: str = "") -> None:
        self.asked, self.rule, self.nearest = asked, rule, nearest
        super().__init__(": ".join(part for part in (asked, rule) if part) + (f" {nearest}" if nearest else ""))

    @property
    def line(self) -> str:
        """What the user sees of it."""
        return f"error: {self}"

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the class with the joined message alone, and the parts would be lost between processes.
        return (type(self), (self.asked, self.rule, self.nearest))


class SpecError(MeshwrightError, ValueError):
    """A description (recipe, flag, environment) is wrong by itself. Carries every fault, not the first."""

    exit_code = 2

    def __init__(self, asked: str, rule: str = "", nearest: str = "", faults: Sequence[Fault] = ()) -> None:
        super().__init__(asked, rule, nearest)
        self.faults = tuple(faults) or (Fault(asked, rule, nearest),)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.asked, self.rule, self.nearest, self.faults))


class LayoutError(SpecError):
    """Parallel degrees do not multiply to the world, do not divide the model, or contradict each other."""


class BatchError(SpecError):
    """global_batch_size = dp_degree * num_microbatches * microbatch_size has no whole solution."""


class CatalogError(SpecError):
    """A name is in no catalogue; the message names the nearest ones."""


class NoFeasibleLayout(MeshwrightError):
    """No layout fits the cluster; the message says by how much the best one misses."""

    exit_code = 3


class RunError(MeshwrightError, RuntimeError):
    """A run failed after it was described rightly."""

    exit_code = 4


class MeshMismatch(RunError):
    """The number of processes that were launched is not the layout's world size."""


class RankDied(RunError):
    """A rank died, hung or was stopped; the message names the rank, its last step and the cause."""


class RankDisagreement(RunError):
    """Ranks that must hold equal weights, buffers or recipes hold different ones."""


class NonFiniteError(RunError):
    """A loss or gradient norm is NaN or infinite; the message names step, rank and microbatch."""


class DataError(RunError):
    """Data is missing, unreadable or of the wrong form."""


class CheckpointError(MeshwrightError, OSError):
    """A checkpoint cannot be read or written; what was on disk before is untouched."""

    exit_code = 5


class Interrupted(MeshwrightError):
    """The user pressed Ctrl-C."""

    exit_code = 130

    @property
    def line(self) -> str:
        """What the user sees of it, who asked for it."""
        return str(self)


class MeshwrightWarning(UserWarning):
    """Something that the user should know, and that does not stop the run. Rank 0 shows it."""
