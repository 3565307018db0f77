"""Rows of tokens against a naive re-implementation, and every way in which data can be wrong."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import DataError
from meshwright.spec.sections import DataSection
from meshwright.train.corpus import IGNORED, PackedRows, PaddedRows, _padded, load_corpus, stdlib_files

QUICK = settings(max_examples=60, deadline=None)
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


def text(path: Path | str, **keys: Any) -> DataSection:
    return DataSection(source="text", path=str(path), **keys)


def all_rows(rows: PackedRows | PaddedRows) -> list[tuple[list[int], list[int]]]:
    got = rows.rows(np.arange(rows.num_rows))
    assert got["tokens"].dtype == got["labels"].dtype == np.int64
    return list(zip(got["tokens"].tolist(), got["labels"].tolist(), strict=True))


@QUICK
@given(st.lists(st.integers(0, 255), min_size=2, max_size=80), st.integers(1, 12))
def test_packed_rows_are_cut_one_after_the_other_with_labels_one_ahead(ids: list[int], s: int) -> None:
    rows = PackedRows(np.array(ids, np.uint8), s)
    naive = []
    for start in range(0, len(ids), s):
        if start + s + 1 <= len(ids):
            naive.append((ids[start : start + s], ids[start + 1 : start + s + 1]))
    assert rows.num_rows == len(naive)
    assert not naive or all_rows(rows) == naive


@QUICK
@given(st.lists(st.lists(st.integers(0, 255), max_size=15), min_size=1, max_size=8), st.integers(1, 6))
def test_padded_rows_hold_every_next_token_of_every_document_once(documents: list[list[int]], s: int) -> None:
    joined = np.array([i for d in documents for i in d], np.uint8)
    rows = _padded(joined, np.cumsum([len(d) for d in documents], dtype=np.int64), s)
    naive = []
    for document in documents:
        pairs = list(itertools.pairwise(document))  # token and label
        for at in range(0, len(pairs), s):
            some = pairs[at : at + s]
            missing = s - len(some)
            naive.append(([t for t, _ in some] + [0] * missing, [x for _, x in some] + [IGNORED] * missing))
    assert rows.num_rows == len(naive)
    assert not naive or all_rows(rows) == naive


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_of_ids_is_read_in_its_type_and_mapped(dtype: str, tmp_path: Path) -> None:
    top = min(np.iinfo(dtype).max, 2**31)
    ids = np.array([0, 1, 2, top, 3, 4, 5], dtype)
    ids.tofile(tmp_path / "ids.bin")
    data = DataSection(source="tokens", path=str(tmp_path / "ids.bin"), token_dtype=dtype, seq_len=3)
    corpus = load_corpus(data, None)
    assert isinstance(corpus.rows.ids, np.memmap) and corpus.vocab_size is None
    assert all_rows(corpus.rows) == [([0, 1, 2], [1, 2, top]), ([top, 3, 4], [3, 4, 5])]
    assert "7 tokens, 2 rows of 3" in corpus.about and "fill no row" not in corpus.about


def test_a_file_folder_and_glob_give_their_files_in_the_order_of_paths(tmp_path: Path) -> None:
    for name, content in {"b.txt": "bb", "a.txt": "aa", "sub/c.md": "cc", ".hidden": "xx", ".git/HEAD": "yy"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    one = load_corpus(text(tmp_path / "b.txt", seq_len=2))
    assert bytes(one.rows.ids) == b"bb\n" and one.about.endswith("1 files, 3 tokens, 1 rows of 2")
    assert bytes(load_corpus(text(tmp_path, seq_len=2)).rows.ids) == b"aa\nbb\ncc\n"  # .git is nobody's text
    assert bytes(load_corpus(text(tmp_path / "*.txt", seq_len=2)).rows.ids) == b"aa\nbb\n"
    assert bytes(load_corpus(text(tmp_path / "**" / "*", seq_len=2)).rows.ids) == b"aa\nbb\ncc\n"


def test_padding_keeps_documents_apart_and_packing_joins_them(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes("né".encode())
    (tmp_path / "2").write_bytes(b"")
    (tmp_path / "3").write_bytes(b"xyz")
    padded = load_corpus(text(tmp_path, seq_len=2, pack=False)).rows
    n, a, b, x, y, z, end = *"né".encode(), *b"xyz\n"
    # The empty file is a newline: a token with nothing after it, so no label and no row.
    assert all_rows(padded) == [([n, a], [a, b]), ([b, 0], [end, IGNORED]), ([x, y], [y, z]), ([z, 0], [end, IGNORED])]
    packed = load_corpus(text(tmp_path, seq_len=3)).rows
    assert all_rows(packed)[1] == ([end, end, x], [end, x, y])
    assert load_corpus(text(tmp_path, seq_len=4)).about.endswith("2 rows of 4") and packed.num_rows == 2
    assert load_corpus(text(tmp_path, seq_len=3)).about.endswith("2 rows of 3; the last 2 tokens fill no row")


def test_the_standard_library_is_read_without_its_tests() -> None:
    files = stdlib_files()
    names = {path.name for path in files}
    assert {"argparse.py", "ast.py", "dataclasses.py"} <= names and len(files) > 400
    assert not any({"test", "tests", "site-packages", "__pycache__"} & set(path.parts[-3:-1]) for path in files)
    corpus = load_corpus(DataSection(source="python-stdlib", seq_len=128))
    size = sum(path.stat().st_size + 1 for path in files)
    assert len(corpus.rows.ids) == size and corpus.rows.num_rows == (size - 1) // 128 and corpus.vocab_size == 256


def refused(data: DataSection, match: str, vocab_size: int | None = None) -> None:
    with pytest.raises(DataError, match=match):
        load_corpus(data, vocab_size)


def test_missing_data_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("x" * 50)
    refused(
        text(tmp_path / "trian.txt"), r"no file, no folder with files and no glob.*Nearest that exists: .*train\.txt"
    )
    refused(text(tmp_path / "nowhere" / "x.txt"), "Looked from")
    refused(text(tmp_path / "*.md"), "no glob that matches")
    (tmp_path / "empty").mkdir()
    refused(text(tmp_path / "empty"), "no folder with files")
    refused(DataSection(source="tokens", path=str(tmp_path)), "is no file")


def test_too_little_data_is_refused_with_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "few").write_bytes(b"abc")
    refused(text(tmp_path / "few", seq_len=8), r"4 tokens, and a row of data.seq_len = 8 takes 9.*data.seq_len = 3")
    (tmp_path / "none").write_bytes(b"")
    refused(text(tmp_path / "none", seq_len=8), "1 tokens")
    refused(text(tmp_path / "none", seq_len=8, pack=False), "holds no row")
    refused(DataSection(source="tokens", path=str(tmp_path / "none")), "0 tokens")
    assert load_corpus(text(tmp_path / "few", seq_len=8, pack=False)).rows.num_rows == 1


def test_a_file_of_another_integer_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"12345")
    refused(DataSection(source="tokens", path=str(tmp_path / "odd")), "5 bytes, which is no whole number of uint16")
    np.array([-1, 2, -100], np.int32).tofile(tmp_path / "negative")
    data = DataSection(source="tokens", path=str(tmp_path / "negative"), token_dtype="int32", seq_len=2)
    with pytest.raises(DataError, match="token id -1 in row 0: is below 0"):
        load_corpus(data).rows.rows(np.array([0]))  # as a label, -100 would count for nothing, silently


def test_an_id_outside_the_vocabulary_is_refused_when_it_is_read(tmp_path: Path) -> None:
    np.array([1, 2, 3, 4, 99, 5, 6], np.uint16).tofile(tmp_path / "ids")
    rows = load_corpus(DataSection(source="tokens", path=str(tmp_path / "ids"), seq_len=2), vocab_size=99).rows
    assert rows.rows(np.array([0]))["tokens"].tolist() == [[1, 2]]
    with pytest.raises(DataError, match="token id 99 in row 1: is outside the vocabulary of 99"):
        rows.rows(np.array([0, 1]))


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "secret").write_bytes(b"abcdef")
    monkeypatch.setattr(Path, "read_bytes", denied)
    refused(text(tmp_path / "secret"), "secret: cannot be read: Permission denied")
