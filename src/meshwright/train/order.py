"""Which samples step k trains on: a pure function of (seed, epoch, position), the same on every layout.

The order is computed, not stored: a permutation of any size costs the same few operations per index, so the position
in the data is the step number alone, and resuming costs nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DataError

Ids = NDArray[np.int64]

_BLOCK = 4096
"""Positions that are shuffled in one go: numpy takes hardly longer over this many than over the few of a step."""

_ROUNDS = 8
"""Rounds of the Feistel network. Four make a pseudo-random permutation of large domains (Luby and Rackoff 1988); tiny
domains need more, and a round costs nanoseconds."""


def permute(positions: Ids, size: int, key: str) -> Ids:
    """Map positions to a pseudo-random permutation of range(size), without building it.

    A balanced Feistel network permutes the smallest 4**k >= size; results outside range(size) walk on along their cycle
    until they fall inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", method 2). The domain is at
    most 4 times the size, so the walk takes at most 4 passes on average.

    Args:
        positions: indices in range(size), any shape.
        size: number of elements, >= 1.
        key: names the permutation.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest(), dtype="<u8")
    out = _feistel(positions.astype(np.uint64), half_bits, keys)
    outside = out >= size
    while outside.any():
        out[outside] = _feistel(out[outside], half_bits, keys)
        outside = out >= size
    return out.astype(np.int64)


def _feistel(x: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Split:
    """Cuts samples 0..num_samples-1 into a training part and a held-out part, by seed alone.

    Attributes:
        num_samples: samples in the data set.
        fraction: share that is held out.
        seed: the recipe's seed.
        shuffle: False holds out the last samples, so that the others keep their order.
    """

    num_samples: int
    fraction: float
    seed: int
    shuffle: bool = True

    @property
    def num_held_out(self) -> int:
        """Samples that are never trained on."""
        return int(self.num_samples * self.fraction + 1e-9)  # 100 * 0.29 is 28.999999999999996

    @property
    def num_training(self) -> int:
        """Samples that are trained on."""
        return self.num_samples - self.num_held_out

    def training_ids(self, positions: Ids) -> Ids:
        """Sample ids of positions in range(num_training)."""
        return self._ids(positions) if self.num_held_out else positions

    def held_out_ids(self, positions: Ids) -> Ids:
        """Sample ids of positions in range(num_held_out)."""
        return self._ids(positions + self.num_training)

    def _ids(self, positions: Ids) -> Ids:
        return permute(positions, self.num_samples, f"split/{self.seed}") if self.shuffle else positions


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The samples of each optimizer step.

    Attributes:
        split: the samples that are trained on.
        global_batch_size: samples per step.
        seed: the recipe's seed.
        shuffle: False keeps the data set's own order in each epoch.
        last_batch: `drop` | `keep`: what becomes of an epoch's incomplete last batch.
    """

    split: Split
    global_batch_size: int
    seed: int
    shuffle: bool = True
    last_batch: str = "drop"

    def __post_init__(self) -> None:
        if self.steps_per_epoch == 0:
            raise DataError(
                f"an epoch of {self.split.num_training} samples",
                f'has no whole global batch of {self.global_batch_size}, and data.last_batch = "drop" uses no other.',
                f"Nearest that work: batch.global_batch_size = {max(1, self.split.num_training)}, or "
                'data.last_batch = "keep".',
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        whole, rest = divmod(self.split.num_training, self.global_batch_size)
        return whole + (1 if rest and self.last_batch == "keep" else 0)

    @property
    def left_over(self) -> int:
        """Samples that an epoch does not train on."""
        return 0 if self.last_batch == "keep" else self.split.num_training % self.global_batch_size

    def epoch_of(self, step: int) -> int:
        """Epoch of a step; both count from 0."""
        return step // self.steps_per_epoch

    def samples_of(self, step: int) -> Ids:
        """Ids of the samples of a step (from 0), in order: global_batch_size of them, or what an epoch has left."""
        epoch, offset = divmod(step, self.steps_per_epoch)
        first = offset * self.global_batch_size
        end = min(first + self.global_batch_size, self.split.num_training)
        ids = [_block(self, epoch, i) for i in range(first // _BLOCK, -(-end // _BLOCK))]
        skipped = first // _BLOCK * _BLOCK
        return np.concatenate(ids)[first - skipped : end - skipped]

    def samples_before(self, step: int) -> int:
        """Samples that the steps before this one trained on."""
        epoch, offset = divmod(step, self.steps_per_epoch)
        per_epoch = self.split.num_training - self.left_over
        return epoch * per_epoch + offset * self.global_batch_size

    def sentence(self) -> str:
        """What an epoch is made of, and what it leaves, in one line."""
        text = f"data: {self.split.num_training:,} samples, {self.steps_per_epoch:,} steps an epoch"
        if self.left_over:
            others = ", others each time" if self.shuffle else ""
            text += f"; each epoch leaves {self.left_over} of them unused{others} (last_batch = drop)"
        elif rest := self.split.num_training % self.global_batch_size:
            text += f"; the last step of each has {rest} samples (last_batch = keep)"
        if self.split.num_held_out:
            text += f"; {self.split.num_held_out} held out for validation"
        return text


@lru_cache(maxsize=4)
def _block(order: SampleOrder, epoch: int, index: int) -> Ids:
    """Sample ids at the positions of an epoch from index * _BLOCK on."""
    size = order.split.num_training
    positions = np.arange(index * _BLOCK, min((index + 1) * _BLOCK, size), dtype=np.int64)
    if order.shuffle:
        positions = permute(positions, size, f"order/{order.seed}/{epoch}")
    return order.split.training_ids(positions)
