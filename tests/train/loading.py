"""What tests of loading share: the places of a rank's microbatches, and waiting for threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable

from meshwright.spec.batch import BatchPlan
from meshwright.train.loader import Cut
from meshwright.train.order import SampleOrder, Split


def wait_until(holds: Callable[[], bool], limit_s: float = 5.0) -> bool:
    end = time.monotonic() + limit_s
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def cut(size: int, batch: int = 4, micro: int = 2, ranks: int = 1, rank: int = 0) -> Cut:
    order = SampleOrder(Split(size, 0.0, 0), batch, 0, last_batch="keep")
    return Cut(order, BatchPlan(batch, micro, ranks), rank)
