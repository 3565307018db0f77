"""Text to ids: bytes, or a JSON file of the `tokenizers` library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError, SpecError


class Tokenizer(Protocol):
    """Turns one document (UTF-8 bytes) into ids in range(vocab_size), and ids into text."""

    @property
    def vocab_size(self) -> int:
        """Ids are in range(vocab_size)."""

    def encode(self, document: bytes) -> NDArray[np.generic]:
        """Ids of one UTF-8 document."""

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Each byte is an id."""

    vocab_size: int = 256

    def encode(self, document: bytes) -> NDArray[np.generic]:
        """Ids of one UTF-8 document."""
        return np.frombuffer(document, dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        return bytes(ids).decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class FileTokenizer:
    """A `tokenizers.Tokenizer` read from its JSON file."""

    inner: Any

    @property
    def vocab_size(self) -> int:
        """Ids are in range(vocab_size)."""
        # Ids may have gaps; the embedding needs a row for the largest.
        return 1 + max(int(i) for i in self.inner.get_vocab(with_added_tokens=True).values())

    def encode(self, document: bytes) -> NDArray[np.generic]:
        """Ids of one UTF-8 document."""
        text = document.decode("utf-8", errors="replace")
        # encode() would hold the interpreter for the whole document, and a rank that gives no sign of life is ended
        return np.array(self.inner.encode_batch([text], add_special_tokens=False)[0].ids, dtype=np.uint32)

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        return str(self.inner.decode(ids))


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the path of a tokenizer JSON file.

    Raises:
        SpecError: the `tokenizers` package is missing.
        DataError: the file is missing or is no tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer()
    if not Path(name).is_file():
        raise DataError(f"data.tokenizer = {name!r}", "is no file.", 'Nearest that works: data.tokenizer = "bytes".')
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError as error:
        raise SpecError(
            f"data.tokenizer = {name!r}",
            "needs the package tokenizers.",
            "Install it with: pip install 'meshwright[hf]'",
        ) from error
    try:
        inner = Inner.from_file(name)
    except Exception as error:  # the library raises bare Exception for a bad file
        raise DataError(f"data.tokenizer = {name!r}", f"is no tokenizer file: {error}.") from error
    if not inner.get_vocab_size():
        raise DataError(f"data.tokenizer = {name!r}", "has an empty vocabulary.")
    inner.no_truncation()  # such files often hold the settings of their last use, as to cut documents at 128 ids
    inner.no_padding()
    return FileTokenizer(inner)
