"""Microbatches: which rows each is made of, and token rows ready before the step asks for them.

Token rows may be read by a thread, because they use no random numbers; for data sets of any kind see `dataset.py`.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, final

import numpy as np
import torch

from meshwright.spec.batch import BatchPlan, microbatches_of_rank
from meshwright.train.corpus import Corpus, checksum
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
                yield Place(step, epoch, total, samples[:0], samples[:size], last)


class Source(Protocol):
    """Where rows come from: how many samples, and microbatches for a sequence of places."""

    @property
    def num_samples(self) -> int:
        """Samples in the data."""

    @property
    def checksum(self) -> int | None:
        """Tells one content from another; None where only the user could."""

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

    @property
    def checksum(self) -> int | None:
        """Of the token ids."""
        return checksum(self.corpus.rows.ids)

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


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a nested batch; what knows how to move itself (`.to`) does so."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, dict):
        moved = copy.copy(batch)  # of its own class, with whatever else that holds
        moved.update((name, to_device(value, device)) for name, value in batch.items())
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
