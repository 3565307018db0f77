"""Which part of a parameter a rank of a tensor-parallel group has, before ZeRO cuts its rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One parameter over the tp ranks.

    Attributes:
        shape: of the whole parameter.
        dim: dimension that is cut; None where every rank has all of it.
        start: first index along `dim` that this rank has; 0 if nothing is cut.
        stop: one past its last index; `start` where a rank has none.
        copies: neighbouring tp ranks that have this same part, 1 if only this one: all of them where nothing is cut.
        partial: the gradient on this rank is one addend of a sum over those copies; False where they are equal.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    stop: int = 0
    copies: int = 1
    partial: bool = False

    @property
    def index(self) -> tuple[slice, ...]:
        """This part in the whole: `whole[cut.index]`."""
        if self.dim is None:
            return tuple(slice(0, size) for size in self.shape)
        return tuple(
            slice(self.start, self.stop) if dim == self.dim else slice(0, size) for dim, size in enumerate(self.shape)
        )

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's part."""
        return tuple(piece.stop - piece.start for piece in self.index)
