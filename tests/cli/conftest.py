"""What the tests of the command line share: `meshwright(...)`, the command, run for real (see warm.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cli.warm import Bench, Result


@pytest.fixture(scope="session")
def meshwright() -> Iterator[Callable[..., Result]]:
    """`meshwright("train", "r.toml", cwd=folder)` runs the command and returns its code and what it printed."""
    bench = Bench()
    yield bench.call
    bench.close()
