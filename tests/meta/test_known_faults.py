"""Every fault of the field's other tools that this version could have has a test that names it."""

from __future__ import annotations

import csv
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]

LATER = {
    "context parallelism is not run yet": "B012",
    "nothing is chosen by trial runs": "B121 B122",
    "no helper process saves in the background yet": "B068",
}
"""Rows that need what this version does not have, by reason."""


def _rows() -> list[dict[str, str]]:
    with (TESTS / "cases" / "known_faults.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_each_known_fault_is_named_by_a_test_or_waits_for_its_feature() -> None:
    text = "\n".join(p.read_text(encoding="utf-8") for p in TESTS.rglob("test_*.py") if p != Path(__file__))
    named = set(re.findall(r"\bB\d{3}\b|(?<=_)b\d{3}(?=\b|_)", text))
    named = {name.upper() for name in named}
    waiting = {name for names in LATER.values() for name in names.split()}
    known = {row["id"] for row in _rows()}
    assert waiting <= known
    assert sorted(known - named - waiting) == []


def test_no_row_waits_that_a_test_names_already() -> None:
    text = "\n".join(p.read_text(encoding="utf-8") for p in TESTS.rglob("test_*.py") if p != Path(__file__))
    waiting = {name for names in LATER.values() for name in names.split()}
    assert sorted(name for name in waiting if re.search(rf"def test\w*{name.lower()}\b", text)) == []
