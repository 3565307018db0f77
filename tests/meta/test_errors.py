"""The tree of errors: its codes, its words, and that it survives a journey between processes."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

from meshwright import errors
from meshwright.errors import CheckpointError, Fault, MeshwrightError, SpecError

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, MeshwrightError)]
CODES = {
    "SpecError": 2, "LayoutError": 2, "BatchError": 2, "CatalogError": 2, "NoFeasibleLayout": 3, "RunError": 4,
    "MeshMismatch": 4, "RankDied": 4, "RankDisagreement": 4, "NonFiniteError": 4, "DataError": 4, "CheckpointError": 5,
    "Interrupted": 130, "MeshwrightError": 70,
}  # fmt: skip


def test_every_error_has_its_exit_code() -> None:
    assert {cls.__name__: cls.exit_code for cls in CLASSES} == CODES


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn: dict[str, str] = {}
    path: list[str] = ["MeshwrightError"]
    for indent, name in re.findall(r"^    ([ |`]*)- ?(\w+)", errors.__doc__ or "", re.MULTILINE):
        depth = len(indent) // 3 + 1
        path = [*path[:depth], name]
        drawn[name] = path[depth - 1]
    parents = {cls.__name__: cls.__mro__[1].__name__ for cls in CLASSES if cls is not MeshwrightError}
    assert drawn == parents


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        ("SpecError", ValueError),
        ("LayoutError", ValueError),
        ("RunError", RuntimeError),
        ("DataError", RuntimeError),
        ("CheckpointError", OSError),
    ],
)
def test_who_knows_only_the_builtin_error_catches_ours(cls, builtin) -> None:
    with pytest.raises(builtin, match=r"^what: broke\. Do this\.$"):
        raise getattr(errors, cls)("what", "broke.", "Do this.")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_travels_between_processes_whole(cls) -> None:
    error = cls("what", "broke with 3 of 4.", "Nearest: 4.")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls and str(back) == str(error) == "what: broke with 3 of 4. Nearest: 4."
    assert (back.asked, back.rule, back.nearest) == ("what", "broke with 3 of 4.", "Nearest: 4.")
    assert [str(cls(*parts)) for parts in (("a",), ("a", "b."), ("a", "", "c."))] == ["a", "a: b.", "a c."]


def test_a_spec_error_carries_every_fault() -> None:
    faults = [Fault("a.b", "is 1.", "Nearest: 2."), Fault("c", "is 3.")]
    back = pickle.loads(pickle.dumps(SpecError("r.toml", "2 faults", faults=faults)))
    assert back.faults == tuple(faults)
    assert [str(fault) for fault in faults] == ["a.b: is 1. Nearest: 2.", "c: is 3."]
    assert SpecError("a", "b.", "c.").faults == (Fault("a", "b.", "c."),)


def test_a_checkpoint_error_has_no_number_of_the_system() -> None:
    error = CheckpointError("checkpoint x", "has no manifest.json.")
    assert error.errno is None and error.filename is None


def test_every_error_that_the_code_raises_on_purpose_is_of_the_tree() -> None:
    """`raise` of something else is our own bug by contract, so only a few places may do it: each says why there."""
    source = Path(inspect.getfile(errors)).parent
    allowed = {"Terminated", "AttributeError", "SystemExit"}
    names = {cls.__name__ for cls in CLASSES}
    for path in source.rglob("*.py"):
        for name in re.findall(r"^\s*raise ([A-Z]\w+)\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert name in names | allowed, f"{path}: raise {name}"
