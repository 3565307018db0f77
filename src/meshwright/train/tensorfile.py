"""A safetensors file written one tensor at a time, so that no process holds more than one whole tensor of a cut model.

The safetensors library writes a file from a dictionary of all tensors; reading, which it does by slices, is left to it.
Format: https://github.com/safetensors/safetensors, "Format": 8 bytes with the size of the header, the header in JSON,
the bytes of the tensors without gaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, final

import torch

from meshwright.errors import CheckpointError
from meshwright.train.stored import DTYPES

_NAMES: Final = {getattr(torch, name): short for short, name in DTYPES.items() if hasattr(torch, name)}
_ALIGNED: Final = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a tensor before its values are: name, type, shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def in_file_order(entries: Sequence[Entry]) -> list[Entry]:
    """Wide types first, so that each tensor lies on a multiple of its type's size; then by name."""
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))


@final
class TensorWriter:
    """Writes tensors in the order of their entries.

    A disk that fails is remembered and not raised before `close`: other ranks may be in the middle of the collectives
    that put the tensors together.

    Args:
        path: file to make.
        entries: all tensors, in file order.

    Raises:
        CheckpointError: the format has no such type.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self.path = path
        self.error: OSError | None = None
        self._file: IO[bytes] | None = None
        self._open = list(entries)
        header = _header(entries)
        try:
            self._file = path.open("wb")
            self._file.write(header)
        except OSError as error:
            self.error = error

    def add(self, tensor: torch.Tensor) -> None:
        """Write the next tensor."""
        entry = self._open.pop(0)
        assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), (entry, tensor.shape)
        if self.error is None and self._file is not None:
            try:
                self._file.write(_raw(tensor))
            except OSError as error:
                self.error = error

    def close(self) -> None:
        """Bring it to the disk.

        Raises:
            OSError: it could not be written.
        """
        if self._file is None or self.error is not None:
            self._abandon()
            raise self.error or OSError(f"{self.path} was not opened")
        assert not self._open, self._open
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:
            self._abandon()
            raise
        self._file.close()

    def _abandon(self) -> None:
        """Let go of a file that cannot be written; closing it writes what is left, and fails again."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


def _header(entries: Sequence[Entry]) -> bytes:
    table: dict[str, Any] = {}
    start = 0
    for entry in entries:
        if entry.dtype not in _NAMES:
            kind = str(entry.dtype).removeprefix("torch.")
            raise CheckpointError(f"tensor {entry.name}", f"is {kind}, which a safetensors file cannot hold.")
        end = start + entry.dtype.itemsize * torch.Size(entry.shape).numel()
        table[entry.name] = {
            "dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end],
        }  # fmt: skip
        start = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor: contiguous and little-endian, as on every machine that torch runs on."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
