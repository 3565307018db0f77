"""Text to ids: bytes, and files of the `tokenizers` library."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import DataError, SpecError
from meshwright.spec.sections import DataSection
from meshwright.train.corpus import load_corpus
from meshwright.train.tokenizer import load_tokenizer

tokenizers = pytest.importorskip("tokenizers")


def words(path: Path, prepare: Any = lambda tokenizer: None) -> str:
    vocab = {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 9}  # with a gap
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    prepare(made)
    made.save(str(path))
    return str(path)


def test_bytes_are_their_own_ids_and_come_back() -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode("dé\xff".encode())
    assert ids.tolist() == list("dé\xff".encode()) and tokenizer.vocab_size == 256
    assert tokenizer.decode(ids.tolist()) == "dé\xff" and tokenizer.decode([0xFF]) == "�"


def test_a_tokenizer_file_gives_its_ids_and_room_for_the_largest(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(words(tmp_path / "t.json"))
    assert tokenizer.encode(b"to be or \xff not to be").tolist() == [1, 2, 3, 0, 9, 1, 2]
    assert tokenizer.vocab_size == 10 and tokenizer.decode([1, 2]) == "to be"


def test_special_tokens_are_not_added_and_settings_of_an_earlier_use_do_not_cut_or_pad(tmp_path: Path) -> None:
    def prepare(made: Any) -> None:
        made.enable_truncation(3)
        made.enable_padding(length=8)
        pair = [("[UNK]", 0)]
        made.post_processor = tokenizers.processors.TemplateProcessing("[UNK] $A", special_tokens=pair)

    tokenizer = load_tokenizer(words(tmp_path / "t.json", prepare))
    assert tokenizer.encode(b"to be or not to be").tolist() == [1, 2, 3, 9, 1, 2]
    assert tokenizer.encode(b"be").tolist() == [2]


def test_a_corpus_is_read_through_it_document_by_document(tmp_path: Path) -> None:
    file = words(tmp_path / "t.json")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "1").write_text("to be")
    (tmp_path / "text" / "2").write_text("")  # no token at all: a newline is white space here
    (tmp_path / "text" / "3").write_text("or not")
    section = DataSection(source="text", path=str(tmp_path / "text"), tokenizer=file, seq_len=3)
    corpus = load_corpus(section)
    assert corpus.rows.ids.tolist() == [1, 2, 3, 9] and corpus.vocab_size == 10
    assert "3 files, 4 tokens, 1 rows of 3" in corpus.about


@pytest.mark.parametrize(("content", "match"), [(None, "is no file.*bytes"), ("{}", "is no tokenizer file")])
def test_what_is_no_tokenizer_is_refused(content: str | None, match: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(DataError, match=match):
        load_tokenizer(str(tmp_path / "t.json"))


def test_an_empty_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token="x")).save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match="empty vocabulary"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_a_missing_package_is_said_with_the_way_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = words(tmp_path / "t.json"), builtins.__import__

    def no_tokenizers(name: str, *rest: Any, **more: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_tokenizers)
    with pytest.raises(SpecError, match=r"needs the package tokenizers.*meshwright\[hf\]"):
        load_tokenizer(file)
