"""Files and functions stay short enough to be read in one go."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE_LINES, FUNCTION_LINES = 400, 60


def sources() -> list[Path]:
    return sorted((ROOT / "src").rglob("*.py"))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Every function of a file with its length, its docstring and decorators included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield f"{path.relative_to(ROOT)}:{first} {node.name}", (node.end_lineno or first) - first + 1


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert len(lengths) > 50
    assert {name: length for name, length in lengths.items() if length > FILE_LINES} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    lengths = dict(pair for path in sources() for pair in functions(path))
    assert len(lengths) > 300
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES} == {}


def test_most_functions_are_much_shorter() -> None:
    lengths = sorted(length for path in sources() for _, length in functions(path))
    assert lengths[len(lengths) // 2] <= 15
