"""Random data sets: numbers depend on (seed, epoch, sample) alone, on any layout and with any number of workers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from meshwright.spec.batch import BatchPlan
from meshwright.train.dataset import DatasetSource
from meshwright.train.loader import Cut
from meshwright.train.order import SampleOrder, Split

SIZE, BATCH, MICRO = 12, 12, 2
Draws = dict[tuple[int, int], tuple[float, ...]]


class Dice:
    """Draws from every global generator; how many numbers, the sample decides."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> tuple[int, float, float, float]:
        torch.rand(i % 3), np.random.rand(i % 2)
        return i, random.random(), float(np.random.rand()), float(torch.rand(()))


def draws(workers: int, ranks: int, seed: int = 0, epochs: int = 2, collate: Any = None) -> Draws:
    """(epoch, sample) -> what it drew, over all ranks."""
    order = SampleOrder(Split(SIZE, 0.0, seed), BATCH, seed)
    found: Draws = {}
    for rank in range(ranks):
        cut = Cut(order, BatchPlan(BATCH, MICRO, ranks), rank)
        for m in DatasetSource(Dice(), seed, workers, collate=collate).stream(cut.places(0, epochs)):
            found |= {(m.epoch, int(row[0])): tuple(float(x) for x in row[1:]) for row in zip(*m.batch, strict=True)}
    assert len(found) == SIZE * epochs
    return found


def test_b036_b038_samples_and_epochs_draw_differently_from_each_generator() -> None:
    found = draws(0, 1)
    for generator in range(3):
        assert len({drawn[generator] for drawn in found.values()}) == SIZE * 2
    assert found.keys() == draws(0, 1, seed=1).keys() and not set(found.values()) & set(draws(0, 1, seed=1).values())


@pytest.mark.parametrize(("workers", "ranks"), [(0, 3), (1, 1), (2, 1), (2, 2)])
def test_b036_any_layout_and_number_of_workers_draws_the_same(workers: int, ranks: int) -> None:
    assert draws(workers, ranks) == draws(0, 1)


def masking(items: list[Any]) -> Any:
    """As collate functions for masked language models do, this one draws for the batch as a whole."""
    noise = float(torch.rand(())) + float(np.random.rand()) + random.random()
    return default_collate([(i, a + noise, b + noise, c + noise) for i, a, b, c in items])


@pytest.mark.parametrize(("workers", "ranks"), [(0, 2), (2, 1), (1, 3)])
def test_a_collate_function_that_draws_does_so_alike_everywhere(workers: int, ranks: int) -> None:
    found = draws(workers, ranks, collate=masking)
    assert found == draws(0, 1, collate=masking) != draws(0, 1)


SCRIPT = """
import os
import tokenizers
from meshwright.spec.batch import BatchPlan
from meshwright.train.dataset import DatasetSource
from meshwright.train.loader import Cut
from meshwright.train.order import SampleOrder, Split

class Words:
    def __init__(self):
        self.inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        self.inner.encode_batch(["a b"] * 64)  # in threads
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return len(self.inner.encode_batch(["a b"] * 64)), os.environ["TOKENIZERS_PARALLELISM"]

order = SampleOrder(Split(8, 0.0, 0), 4, 0)
for epoch in range(2):
    for microbatch in DatasetSource(Words(), 0, 2).stream(Cut(order, BatchPlan(4, 2, 1), 0).places(0, 2)):
        for count, heard in zip(*microbatch.batch):
            print(int(count), heard)
print(os.environ.get("TOKENIZERS_PARALLELISM"))  # this process and what else it starts are left alone
"""


@pytest.mark.parametrize("said", [None, "0"])
def test_b139_forked_workers_with_a_tokenizer_do_not_flood_the_log(said: str | None) -> None:
    pytest.importorskip("tokenizers")
    given = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    environment = given | ({"TOKENIZERS_PARALLELISM": said} if said else {})
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    heard = said or "false"
    assert done.stdout.split("\n")[:-1] == [f"64 {heard}"] * 16 + [str(said)]
    assert done.stderr == ""
