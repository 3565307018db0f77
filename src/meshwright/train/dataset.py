"""Microbatches of a map-style data set.

It may draw random numbers, from generators that belong to the whole process, so it is read by loader processes, or,
with 0 workers, between the steps; and its errors come out as one line that names the sample.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from meshwright.errors import DataError
from meshwright.models.resolve import describe
from meshwright.train.loader import Microbatch, Place


class Seeded(Dataset[Any]):
    """A map-style data set whose random numbers depend on (seed, epoch, sample) alone, never on rank or worker."""

    def __init__(self, inner: Any, seed: int) -> None:
        self.inner, self.seed = inner, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, sample = key
        entropy = np.random.SeedSequence((self.seed, epoch, sample)).generate_state(4, np.uint32)
        random.seed(int(entropy[0]))
        np.random.seed(int(entropy[1]))
        torch.default_generator.manual_seed(int(entropy[2]) << 32 | int(entropy[3]))
        try:
            return self.inner[sample]
        except Exception as error:
            name = type(self.inner).__name__
            return Failure(f"sample {sample} of the data set {name}", f"raised {_in_one_line(error)}")


@dataclass(frozen=True, slots=True)
class Failure:
    """An error in a loader process, as a value: DataLoader would bury it under that process's traceback."""

    asked: str
    rule: str


@final
class Collate:
    """Makes a batch of items; a failed item, or items that do not fit together, make a `Failure`."""

    def __init__(self, inner: Callable[[Any], Any]) -> None:
        self.inner = inner

    def __call__(self, items: list[Any]) -> Any:
        """A batch, or a Failure."""
        for item in items:
            if isinstance(item, Failure):
                return item
        try:
            return self.inner(items)
        except Exception as error:
            return Failure(f"{len(items)} items of the data set", f"do not make a batch: {_in_one_line(error)}")


def _in_one_line(error: Exception) -> str:
    """Type, message and the user's own line, without the pages that some libraries add."""
    return textwrap.shorten(describe(error), 300, placeholder=" ...")


@final
class DatasetSource:
    """Any map-style data set: `len()` and `[i]`.

    Args:
        dataset: the data set.
        seed: the recipe's seed.
        workers: loader processes of this rank; 0 loads in this process.
        pin: True to put batches into page-locked memory.
        collate: makes a batch of a list of items; torch's default_collate if None.

    Raises:
        DataError: it has no length or no items.
    """

    def __init__(
        self, dataset: Any, seed: int, workers: int, pin: bool = False, collate: Callable[[Any], Any] | None = None
    ) -> None:
        self.dataset, self.seed, self.workers, self.pin = dataset, seed, workers, pin
        self.collate = Collate(collate or default_collate)
        self._count = _length(dataset)

    @property
    def num_samples(self) -> int:
        """Samples in the data."""
        return self._count

    @property
    def checksum(self) -> int | None:
        """None: reading a whole data set to compare it would cost an epoch."""
        return None

    def stream(self, places: Iterator[Place]) -> Iterator[Microbatch]:
        """A microbatch for each place, in their order."""
        known: queue.SimpleQueue[Place] = queue.SimpleQueue()

        def keys() -> Iterator[list[tuple[int, int]]]:
            for place in places:
                known.put(place)
                yield [(place.epoch, int(i)) for i in place.read]

        loader = DataLoader(
            Seeded(self.dataset, self.seed),
            batch_sampler=_Keys(keys()),  # (epoch, id) pairs in place of ids
            num_workers=self.workers,
            collate_fn=self.collate,
            pin_memory=self.pin,
            multiprocessing_context="fork" if self.workers else None,
        )
        for batch in self._batches(loader):  # in the order of the keys
            place = known.get()
            if isinstance(batch, Failure):
                raise DataError(batch.asked, batch.rule)
            yield Microbatch(place.step, place.epoch, place.index, place.ids, batch, place.last)

    def _batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches, as long as the loader processes live; these end with this iterator, also after an error."""
        with _tokenizers_at_ease(), _own_child_handler():
            batches = iter(loader)
        try:
            yield from batches
        except (RuntimeError, OSError, EOFError) as error:
            if not self.workers or (isinstance(error, RuntimeError) and "DataLoader worker" not in str(error)):
                raise
            asked = f"a loader process of the data set {type(self.dataset).__name__}"
            hint = "Out of memory, or of shared memory, is the usual cause; data.workers = 0 shows others."
            raise DataError(asked, f"died: {_in_one_line(error)}.", hint) from None
        finally:
            del batches  # an error's traceback would keep them


@contextmanager
def _tokenizers_at_ease() -> Iterator[None]:
    """Processes forked in here do without the threads of `tokenizers`, which warns of that unless it is told before."""
    if _TOKENIZERS in os.environ:
        yield
        return
    os.environ[_TOKENIZERS] = "false"
    try:
        yield
    finally:
        del os.environ[_TOKENIZERS]


@contextmanager
def _own_child_handler() -> Iterator[None]:
    """Take back the handler of SIGCHLD. torch's raises wherever the training is, even while the rank says why it ends.

    A dead loader process is found without it, by the wait for its batch, which looks every 5 s.
    """
    before = signal.getsignal(signal.SIGCHLD)
    yield
    if threading.current_thread() is threading.main_thread() and before is not None:
        signal.signal(signal.SIGCHLD, before)


_TOKENIZERS: Final = "TOKENIZERS_PARALLELISM"


class _Keys:
    """DataLoader wants an iterable with a length that it never uses here."""

    def __init__(self, keys: Iterator[list[tuple[int, int]]]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.keys


def _length(dataset: Any) -> int:
    name = type(dataset).__name__
    is_stream = isinstance(dataset, IterableDataset)  # it has a __getitem__, which raises
    if is_stream or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"data set {name}",
            "is not map-style: without `len(data)` and `data[i]` no order of samples is the same on every layout.",
            "Nearest that works: a list of its items, or a class with __len__ and __getitem__.",
        )
    try:
        count = len(dataset)
    except Exception as error:
        raise DataError(f"length of the data set {name}", f"raised {_in_one_line(error)}.") from error
    if not count:
        raise DataError(f"data set {name}", "is empty.")
    return count
