"""Validation: each held-out sample counts once, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from meshwright.spec.batch import BatchPlan, microbatches_of_rank
from meshwright.train.loader import Microbatch, Place, Source, to_device
from meshwright.train.loss import Pair, divisor
from meshwright.train.order import Split
from meshwright.train.piped import evaluated
from meshwright.train.step import Stepper
from meshwright.train.sums import added


def held_out_places(split: Split, batch: BatchPlan, dp_rank: int) -> Iterator[Place]:
    """This rank's microbatches of the held-out samples: as many on each rank, with stand-ins where rows run out.

    Ranks that stop at different times would leave the others in a collective; ranks that repeat a sample to come out
    even would count it twice. A stand-in is run and counts for nothing.
    """
    size = batch.microbatch_size
    total = -(-split.num_held_out // size)
    mine = microbatches_of_rank(total, batch.dp_degree, dp_rank)
    for k in range(-(-total // batch.dp_degree)):
        index = mine[k] if k < len(mine) else 0
        ids = split.held_out_ids(np.arange(index * size, min((index + 1) * size, split.num_held_out), dtype=np.int64))
        yield Place(step=0, epoch=0, index=index, ids=ids if k < len(mine) else ids[:0], read=ids, last=False)


def evaluate(stepper: Stepper, source: Source, split: Split) -> tuple[float, int]:
    """Mean loss over the held-out samples, and how many there were; collective, the same answer on every rank."""
    model, batch = stepper.parallel.bare, stepper.rules.batch
    total = -(-split.num_held_out // batch.microbatch_size)
    table: torch.Tensor | None = None  # (microbatches, pairs, 2): a row has one owner, so its sum over ranks is exact
    modes = {module: module.training for module in model.modules()}  # parts may be in eval mode for good
    model.eval()
    stepper.parallel.announce(False, False)
    try:
        with torch.no_grad():
            stream = source.stream(held_out_places(split, batch, stepper.mesh.dp_rank))
            for microbatch, pairs in _all_pairs(stepper, stream):
                if table is None:
                    table = torch.zeros(total, len(pairs), 2, dtype=torch.float64)
                if len(microbatch.ids) and stepper.tells:
                    table[microbatch.index] = _row(pairs)
    finally:
        stepper.parallel.settle()
        for module, mode in modes.items():
            module.training = mode
    stepper.parallel.require_same()
    assert table is not None, "a split without held-out samples is not evaluated"
    table = table.to(stepper.mesh.device)
    if not stepper.mesh.is_alone:
        dist.all_reduce(table)
    totals, counts = ([added(column) for column in part] for part in table.permute(2, 1, 0).tolist())
    loss = math.fsum(total / divisor(count) for total, count in zip(totals, counts, strict=True))
    return loss, split.num_held_out


def _all_pairs(stepper: Stepper, stream: Iterator[Microbatch]) -> Iterator[tuple[Microbatch, list[Pair]]]:
    """Each microbatch with what the loss function says of it; nothing but zeros where another stage has the end."""
    if stepper.parallel.pipeline is not None:
        yield from evaluated(stepper, stream)
        return
    for microbatch in stream:
        yield microbatch, stepper.pairs(to_device(microbatch.batch, stepper.mesh.device))


def _row(pairs: Sequence[Pair]) -> torch.Tensor:
    """(pairs, 2) fp64: sums and counts."""
    return torch.tensor([[float(pair.total), float(pair.count)] for pair in pairs], dtype=torch.float64)
