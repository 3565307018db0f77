"""What all tests share: `run_ranks`, which runs a function on real gloo ranks (see ranks.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import RankPool  # noqa: E402  # found by the line above


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks(n, fn, *args)` calls `fn(world, *args)` on n ranks and returns each rank's value."""
    pool = RankPool()
    yield pool.run
    pool.close()
