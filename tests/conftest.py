"""What all tests share: `run_ranks`, which runs a function on real gloo ranks (see ranks.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ranks import RankPool


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks(n, fn, *args)` calls `fn(world, *args)` on n ranks and returns each rank's value."""
    pool = RankPool()
    yield pool.run
    pool.close()
