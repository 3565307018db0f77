"""What one optimizer step takes of a device's memory: the words.

A step tells its `Watch` where it is. In one step of the run, and in no other, the watch listens: on a GPU to the
allocator's own statistics, on a CPU, which has none, to every allocation and every free. Neither touches a tensor, so
what is trained is the same to the last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from meshwright.spec.moments import GRADIENTS, OTHER

Blocks = dict[int, int]
"""Address of a block of memory -> its bytes."""


def sums(told: Mapping[str, Blocks], kept: Blocks, total_bytes: int) -> dict[str, int]:
    """Bytes of each category, and what is left of the total as `other`."""
    sizes = {name: sum(blocks.values()) for name, blocks in told.items()}
    sizes[GRADIENTS] = sizes.get(GRADIENTS, 0) + sum(kept.values())
    return sizes | {OTHER: max(0, total_bytes - sum(sizes.values()))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Memory of one rank at one moment.

    Attributes:
        measured_bytes: of live tensors; the most there were, where the moment lasts.
        reserved_bytes: what the allocator held of the device; None where there is no such allocator.
        categories: `measured_bytes` told apart, where the moment lies between steps; else empty.
    """

    measured_bytes: int
    reserved_bytes: int | None = None
    categories: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is in place at the two ends of a step, by category, each block once.

    Attributes:
        before: at its start.
        after: at its end.
        kept: memory of gradients that outlives them: the buckets that DDP reduces in.
    """

    before: Mapping[str, Blocks]
    after: Mapping[str, Blocks]
    kept: Blocks


class Meter(ABC):
    """Measures one step; a new one for each."""

    @abstractmethod
    def open(self) -> None:
        """A step begins."""

    @abstractmethod
    def enter(self, moment: str) -> None:
        """From now on it is this moment: forward | backward | update."""

    @abstractmethod
    def close(self) -> None:
        """The step is over, or has failed. May be called again."""

    @abstractmethod
    def readings(self, standing: Standing) -> dict[str, Reading]:
        """By moment, once it is closed."""


class Watch(ABC):
    """Where a step says how far it is."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """A step begins, counted from 0; told again where it is computed again."""

    @abstractmethod
    def enter(self, moment: str) -> None:
        """It has come to this moment: forward | backward | update."""


@final
class Unwatched(Watch):
    """Nobody listens."""

    def begin(self, step: int) -> None:
        """Nothing."""

    def enter(self, moment: str) -> None:
        """Nothing."""
