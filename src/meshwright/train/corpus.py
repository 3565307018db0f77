"""Rows of tokens for language models: the standard library's source, text files, or a file of token ids.

Every source ends as a `TokenRows`: how many rows there are, and a function from row ids to arrays. Labels are the next
token; a label of IGNORED counts for nothing.

Shape legend: b rows, s = seq_len.
"""

from __future__ import annotations

import glob
import os
import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError
from meshwright.spec.sections import DataSection
from meshwright.train.order import Ids
from meshwright.train.tokenizer import Tokenizer, load_tokenizer

IGNORED = -100
"""The label that torch's cross_entropy leaves out by default."""

Tokens = NDArray[np.generic]
Rows = dict[str, NDArray[np.int64]]


class TokenRows(Protocol):
    """A source of rows: `tokens` and `labels`, each (b, s) int64."""

    @property
    def ids(self) -> Tokens:
        """Every token, in memory or memory-mapped."""

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""

    def rows(self, ids: Ids) -> Rows:
        """`tokens` and `labels` of these rows, each (b, s) int64."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """All documents joined and cut into full rows; row i predicts ids[i * s + 1 : (i + 1) * s + 1].

    Attributes:
        ids: (n,) integer ids, in memory or memory-mapped.
        seq_len: s.
        vocab_size: if given, ids are checked against it as they are read (a file of ids may hold anything).
    """

    ids: Tokens
    seq_len: int
    vocab_size: int | None = None

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        return max(0, (len(self.ids) - 1) // self.seq_len)

    def rows(self, ids: Ids) -> Rows:
        """`tokens` and `labels` of these rows, each (b, s) int64."""
        at = ids[:, None] * self.seq_len + np.arange(self.seq_len + 1)  # (b, s + 1)
        window = self.ids[at].astype(np.int64)
        if window.min() < 0 or (self.vocab_size is not None and window.max() >= self.vocab_size):
            self._refuse(ids, window)
        return {"tokens": window[:, :-1], "labels": window[:, 1:]}

    def _refuse(self, ids: Ids, window: NDArray[np.int64]) -> None:
        bad = (window < 0) | (window >= (np.iinfo(np.int64).max if self.vocab_size is None else self.vocab_size))
        row, column = (int(x) for x in np.argwhere(bad)[0])
        raise DataError(
            f"token id {window[row, column]} in row {ids[row]}",
            "is below 0." if window[row, column] < 0 else f"is outside the vocabulary of {self.vocab_size}.",
            "Set model.vocab_size above the largest id, or data.token_dtype to the type that the file has.",
        )


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """One document a row (a long one fills several), padded; padding is ignored as a label.

    Attributes:
        ids: (n,) ids of all documents, joined.
        starts: (rows,) where each row begins in ids.
        lengths: (rows,) tokens of each row that carry a label, 1 to s.
        seq_len: s.
    """

    ids: Tokens
    starts: Ids
    lengths: Ids
    seq_len: int

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        return len(self.starts)

    def rows(self, ids: Ids) -> Rows:
        """`tokens` and `labels` of these rows, each (b, s) int64."""
        column = np.arange(self.seq_len)
        at = np.minimum(self.starts[ids][:, None] + np.arange(self.seq_len + 1), len(self.ids) - 1)  # (b, s + 1)
        window = self.ids[at].astype(np.int64)
        valid = column < self.lengths[ids][:, None]  # (b, s)
        return {"tokens": np.where(valid, window[:, :-1], 0), "labels": np.where(valid, window[:, 1:], IGNORED)}


@dataclass(frozen=True, slots=True)
class Corpus:
    """A token source with what the model must know of it.

    Attributes:
        rows: the rows.
        vocab_size: ids the tokenizer can give; None for a file of ids, which does not say.
        about: one phrase for the user.
    """

    rows: TokenRows
    vocab_size: int | None
    about: str


def checksum(ids: Tokens) -> int:
    """A CRC-32 that tells one text from another: of all ids in memory, of 64 places in a memory-mapped file."""
    if not isinstance(ids, np.memmap):
        return zlib.crc32(np.ascontiguousarray(ids).data)
    value = len(ids)
    for start in range(0, len(ids), max(1, len(ids) // 64)):
        value = zlib.crc32(np.ascontiguousarray(ids[start : start + 4096]).data, value)
    return value


def load_corpus(data: DataSection, vocab_size: int | None = None) -> Corpus:
    """Load the source that `[data]` names.

    Args:
        data: the section; `source` decides.
        vocab_size: the model's vocabulary, which a file of ids is checked against.

    Raises:
        DataError: a file is missing, unreadable, empty or too short for one row.
    """
    if data.source == "tokens":
        return _token_file(data, vocab_size)
    tokenizer = load_tokenizer(data.tokenizer or "bytes")
    paths = _text_files(data.path or "") if data.source == "text" else stdlib_files()
    ids, ends = _encode(paths, tokenizer)
    rows: TokenRows = PackedRows(ids, data.seq_len) if data.pack else _padded(ids, ends, data.seq_len)
    where = data.path if data.source == "text" else "the Python standard library's source"
    about = f"{where}: {len(paths)} files, {_counts(rows, data)}"
    return _non_empty(Corpus(rows, tokenizer.vocab_size, about), len(ids), data)


def stdlib_files() -> list[Path]:
    """Source files of the running interpreter's standard library, without its tests and without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - skipped)
        found += [Path(folder, name) for name in sorted(files) if name.endswith(".py")]
    return found


def _text_files(path: str) -> list[Path]:
    """Files of `data.path`: a file, every file in a folder, or a glob; sorted by path."""
    root = Path(path)
    if root.is_file():
        return [root]
    if root.is_dir():
        found = [p for p in root.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(root))]
    else:
        found = [Path(p) for p in glob.glob(path, recursive=True) if Path(p).is_file()]
    if not found:
        raise DataError(
            f"data.path = {path!r}", "is no file, no folder with files and no glob that matches one.", _nearby(root)
        )
    return sorted(found)


def _is_hidden(path: Path) -> bool:
    """Hidden, or in a hidden folder, as .git is."""
    return any(part.startswith(".") for part in path.parts)


def _nearby(path: Path) -> str:
    import difflib

    parent = path.parent
    names = os.listdir(parent) if parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"Nearest that exists: {parent / close[0]}." if close else f"Looked from {Path.cwd()}."


def _encode(paths: Sequence[Path], tokenizer: Tokenizer) -> tuple[Tokens, Ids]:
    """Ids of all documents joined, and where each ends. A newline ends each document, so that rows can cross them."""
    parts = [tokenizer.encode(_read(path) + b"\n") for path in paths]
    return np.concatenate(parts), np.cumsum([len(part) for part in parts], dtype=np.int64)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"data file {path}", f"cannot be read: {error.strerror}.") from error


def _padded(ids: Tokens, ends: Ids, seq_len: int) -> PaddedRows:
    rows = [
        row for start, end in zip([0, *ends[:-1]], ends, strict=True) for row in _cut(int(start), int(end), seq_len)
    ]
    table = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return PaddedRows(ids, table[:, 0], table[:, 1], seq_len)


def _cut(start: int, end: int, seq_len: int) -> Iterable[tuple[int, int]]:
    """(start, labelled tokens) of a document's rows; its last token is only ever a label."""
    for at in range(start, end - 1, seq_len):
        yield at, min(seq_len, end - 1 - at)


def _token_file(data: DataSection, vocab_size: int | None) -> Corpus:
    path, dtype = Path(data.path or ""), np.dtype(data.token_dtype)
    if not path.is_file():
        raise DataError(f"data.path = {data.path!r}", "is no file.", _nearby(path))
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise DataError(
            f"data file {path}",
            f"has {size} bytes, which is no whole number of {dtype} ids of {dtype.itemsize} bytes.",
            "Set data.token_dtype to the type that it was written with.",
        )
    ids: Tokens = np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype)
    rows = PackedRows(ids, data.seq_len, vocab_size)
    return _non_empty(Corpus(rows, None, f"{path}: {_counts(rows, data)}"), len(ids), data)


def _counts(rows: TokenRows, data: DataSection) -> str:
    """How many tokens and rows, and what packing leaves."""
    text = f"{len(rows.ids):,} tokens, {rows.num_rows:,} rows of {data.seq_len}"
    left = len(rows.ids) - 1 - rows.num_rows * data.seq_len if data.pack else 0
    return f"{text}; the last {left} tokens fill no row" if left > 0 else text


def _non_empty(corpus: Corpus, num_tokens: int, data: DataSection) -> Corpus:
    if corpus.rows.num_rows == 0:
        raise DataError(
            f"data ({corpus.about})",
            f"holds no row: {num_tokens} tokens, and a row of data.seq_len = {data.seq_len} takes {data.seq_len + 1}.",
            f"Nearest that works: data.seq_len = {max(1, num_tokens - 1)}." if num_tokens > 1 else "",
        )
    return corpus
