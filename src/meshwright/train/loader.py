"""Microbatches, ready before the step asks for them.

Token sources may be read by a thread (they use no random numbers). A map-style data set may draw random numbers, from
generators that belong to the whole process, so it is read by loader processes, or, with 0 workers, between the steps.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from meshwright.errors import DataError
from meshwright.spec.batch import BatchPlan, microbatches_of_rank
from meshwright.train.corpus import Corpus
from meshwright.train.order import Ids, SampleOrder

Batch = Any
"""What the loss function receives: a dict of tensors for token sources, else what the data set's items collate to."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Rows that go through the model together.

    Attributes:
        step: optimizer step, from 0.
        epoch: epoch, from 0.
        index: place in the step's microbatch grid, over all ranks.
        ids: (b,) sample ids; empty for a stand-in.
        batch: the rows. A rank whose rows run out in a short last batch gets a stand-in, and joins every collective.
        last: True for this rank's last microbatch of the step.
    """

    step: int
    epoch: int
    index: int
    ids: Ids
    batch: Batch
    last: bool


@dataclass(frozen=True, slots=True)
class Place:
    """One microbatch before its rows are loaded: `Microbatch` without the rows; `read` are the ids to read."""

    step: int
    epoch: int
    index: int
    ids: Ids
    read: Ids
    last: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """This rank's share of each step.

    Attributes:
        order: the samples of each step.
        batch: the microbatch grid.
        dp_rank: this rank's place along the data-parallel axes.
    """

    order: SampleOrder
    batch: BatchPlan
    dp_rank: int

    def places(self, first_step: int, end_step: int) -> Iterator[Place]:
        """This rank's microbatches from first_step up to, not including, end_step."""
        for step in range(first_step, end_step):
            yield from self.places_of(step)

    def places_of(self, step: int) -> Iterator[Place]:
        """This rank's microbatches of one step; as many on each rank, with stand-ins where rows run out."""
        samples, size, epoch = self.order.samples_of(step), self.batch.microbatch_size, self.order.epoch_of(step)
        total = -(-len(samples) // size)
        mine = microbatches_of_rank(total, self.batch.dp_degree, self.dp_rank)
        per_rank = -(-total // self.batch.dp_degree)
        for k in range(per_rank):
            last = k == per_rank - 1
            if k < len(mine):
                ids = samples[mine[k] * size : (mine[k] + 1) * size]
                yield Place(step, epoch, mine[k], ids, ids, last)
            else:
                yield Place(step, epoch, total, samples[:0], samples[:1], last)


class Source(Protocol):
    """Where rows come from: how many samples, and microbatches for a sequence of places."""

    @property
    def num_samples(self) -> int:
        """Samples in the data."""

    def stream(self, places: Iterator[Place]) -> Iterator[Microbatch]:
        """A microbatch for each place, in their order."""


@final
@dataclass(frozen=True, slots=True)
class TokenSource:
    """Rows of a `Corpus`.

    A thread reads ahead where a row may have to wait: for the disk, or to be copied into page-locked memory. Taking one
    out of an array costs less than handing it from thread to thread.

    Attributes:
        corpus: the token rows.
        ahead: microbatches that are held ready.
        pin: True to put them into page-locked memory (for a GPU).
    """

    corpus: Corpus
    ahead: int = 8
    pin: bool = False

    @property
    def num_samples(self) -> int:
        """Samples in the data."""
        return self.corpus.rows.num_rows

    def stream(self, places: Iterator[Place]) -> Iterator[Microbatch]:
        """A microbatch for each place, in their order."""
        items = (self._load(place) for place in places)
        may_wait = self.pin or isinstance(self.corpus.rows.ids, np.memmap)
        return read_ahead(items, self.ahead) if may_wait else items

    def _load(self, place: Place) -> Microbatch:
        rows = {
            name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in self.corpus.rows.rows(place.read).items()
        }
        if self.pin:
            rows = {name: tensor.pin_memory() for name, tensor in rows.items()}
        return Microbatch(place.step, place.epoch, place.index, place.ids, rows, place.last)


_END: Final = object()
T = TypeVar("T")


def read_ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """Run an iterator in a thread, `depth` items ahead. An error inside it is raised where the item was due."""
    ready: queue.Queue[Any] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: Any) -> None:
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.2)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(item)
                if stop.is_set():
                    return
            put(_END)
        except BaseException as error:
            put(error)

    threading.Thread(target=work, name="meshwright-loader", daemon=True).start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()


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
            return Failure(f"sample {sample} of the data set {name}", f"raised {type(error).__name__}: {error}")


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
            rule = f"do not make a batch: {type(error).__name__}: {str(error).splitlines()[0]}"
            return Failure(f"{len(items)} items of the data set", rule)


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
        for batch in loader:  # in the order of the keys
            place = known.get()
            if isinstance(batch, Failure):
                raise DataError(batch.asked, batch.rule)
            yield Microbatch(place.step, place.epoch, place.index, place.ids, batch, place.last)


class _Keys:
    """DataLoader wants an iterable with a length that it never uses here."""

    def __init__(self, keys: Iterator[list[tuple[int, int]]]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.keys


def _length(dataset: Any) -> int:
    name = type(dataset).__name__
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"data set {name}",
            "is not map-style: without `len(data)` and `data[i]` no order of samples is the same on every layout.",
            "Nearest that works: a list of its items, or a class with __len__ and __getitem__.",
        )
    if not len(dataset):
        raise DataError(f"data set {name}", "is empty.")
    return len(dataset)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a nested batch."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return type(batch)((name, to_device(value, device)) for name, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return type(batch)(to_device(value, device) for value in batch)  # type: ignore[call-arg]
    return batch
