"""What all tests share: real gloo ranks (ranks.py), and the real command without its start (cli/warm.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cli.warm import Bench, Result
from ranks import RankPool


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks(n, fn, *args)` calls `fn(world, *args)` on n ranks and returns each rank's value."""
    pool = RankPool()
    yield pool.run
    pool.close()


@pytest.fixture(scope="session")
def meshwright() -> Iterator[Callable[..., Result]]:
    """`meshwright("train", "r.toml", cwd=folder)` runs the command and returns its code and what it printed."""
    bench = Bench()
    yield bench.call
    bench.close()
