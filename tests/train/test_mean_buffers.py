"""Buffers in exact mode: a step changes them by the mean of what its microbatches do, whichever ranks have those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.data import default_collate

from meshwright.errors import SpecError
from meshwright.models.digest import state_items
from meshwright.spec.layout import parse_layout
from meshwright.spec.load import from_table
from meshwright.train.buffers import MeanBuffers
from meshwright.train.state import digest_of
from meshwright.train.trainer import Trainer
from train.parity import Record, joined_ids, record_of
from train.small import SLOTS, WIDTH, Net, Points, small_table


class Normed(nn.Module):
    """A batch norm over the samples of a microbatch, and a buffer that only some microbatches change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(SLOTS * WIDTH), Net()
        self.register_buffer("highest", torch.zeros(()))
        self.register_buffer("fixed", torch.linspace(0, 1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.mean() > 0:
            self.highest = torch.maximum(self.highest, x.detach().amax().to(self.highest))
        return self.net(self.norm(x.flatten(1)).view_as(x))


STEPS = 5


def table_on(layout: str, compute: str, reduction: str = "exact", size: int = 50) -> dict[str, Any]:
    """Epochs of 50 samples: two steps of 24, and one of 2 that most ranks have no rows of."""
    degrees = parse_layout(layout)
    dtype = "float64" if compute == "fp64" else "float32"
    return small_table(
        STEPS,
        model={"build": "test_mean_buffers:Normed"},
        data={"build": "train.small:Points", "size": size, "dtype": dtype, "last_batch": "keep"},
        layout={name: getattr(degrees, name) for name in ("dp_replicate", "dp_shard", "zero_stage")},
        batch={"global_batch_size": 24, "microbatch_size": 2},
        precision={"compute": compute},
        train={"reduction": reduction},
    )


Ended = tuple[Record, str, dict[str, torch.Tensor]]


def ended(world: Any, tables: list[dict[str, Any]]) -> list[Ended]:
    """Each training, its `weights_sha256`, and its buffers."""
    found = []
    for table in tables:
        trainer = Trainer(from_table(table), world)
        record = record_of(trainer)
        buffers = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
        found.append((record, digest_of(trainer.state.weights(), True), buffers))
    return found


COMPUTES = ["fp64", "fp32", "bf16"]


def test_buffers_are_equal_to_the_bit_on_any_layout_where_a_short_step_ends_an_epoch(run_ranks) -> None:
    singles: list[Ended] = run_ranks(1, ended, [table_on("single", compute) for compute in COMPUTES])[0]
    assert [len(ids) for ids in singles[0][0].ids] == [24, 24, 2, 24, 24]
    for ranks, layouts in ((2, ["ddp2", "zero3x2"]), (3, ["zero2x3"])):
        cases = [(layout, number) for layout in layouts for number in range(len(COMPUTES))]
        tables = [table_on(layout, COMPUTES[number]) for layout, number in cases]
        for rank in run_ranks(ranks, ended, tables):
            for (layout, number), (record, digest, buffers) in zip(cases, rank, strict=True):
                one, its_digest, its_buffers = singles[number]
                assert buffers.keys() == its_buffers.keys()
                differing = [name for name in buffers if not torch.equal(buffers[name], its_buffers[name])]
                assert differing == [], (layout, COMPUTES[number])
                assert (digest, record.losses) == (its_digest, one.losses), (layout, COMPUTES[number])
    for _, _, buffers in singles:
        assert buffers["norm.num_batches_tracked"] == STEPS  # once a step, though the first is computed twice
        assert buffers["norm.running_mean"].any() and buffers["highest"] > 0
        assert torch.equal(buffers["fixed"], Normed().fixed)


def by_microbatch(ids: list[list[int]], exact: bool) -> nn.BatchNorm1d:
    """The batch norm of steps of these samples: each microbatch after the other, or all from the step's own buffers."""
    norm = nn.BatchNorm1d(SLOTS * WIDTH, dtype=torch.float64)
    for step in ids:
        before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        results = []
        for first in range(0, len(step), 2):
            if exact:
                norm.load_state_dict(before, strict=False)
            norm(default_collate([Points()[i]["x"].flatten() for i in step[first : first + 2]]))
            results.append({name: buffer.clone() for name, buffer in norm.named_buffers()})
        if exact:
            norm.running_mean = torch.stack([result["running_mean"] for result in results]).mean(0)
            norm.running_var = torch.stack([result["running_var"] for result in results]).mean(0)
    return norm


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_step_makes_the_mean_of_its_microbatches_results_and_in_fast_mode_one_after_the_other(
    run_ranks, reduction: str
) -> None:
    ((record, _, buffers),) = run_ranks(1, ended, [table_on("single", "fp64", reduction)])[0]
    norm = by_microbatch(record.ids, reduction == "exact")
    for name in ("running_mean", "running_var"):  # fp64; a mean of 12 may be summed in another order
        assert torch.allclose(buffers[f"norm.{name}"], getattr(norm, name), rtol=1e-14, atol=1e-15)
    microbatches = sum(len(ids) // 2 for ids in record.ids)
    assert buffers["norm.num_batches_tracked"] == (STEPS if reduction == "exact" else microbatches)


def test_in_fast_mode_ranks_keep_their_own_statistics(run_ranks) -> None:
    """Until they are needed, when a run averages them; see test_buffers.py."""
    layouts = ["ddp2", "zero3x2"]
    ranks = run_ranks(2, ended, [table_on(layout, "fp64", "fast", size=96) for layout in layouts])
    for number in range(len(layouts)):
        for rank in ranks:
            record, _, buffers = rank[number]
            norm = by_microbatch(record.ids, exact=False)
            assert torch.allclose(buffers["norm.running_mean"], norm.running_mean, rtol=1e-14, atol=1e-15)  # fp64
            assert buffers["norm.num_batches_tracked"] == 6 * STEPS
        together = joined_ids([rank[number][0] for rank in ranks])
        assert [len(set(ids)) for ids in together] == [24] * STEPS


class Counts(nn.Module):
    """Adds what it is given to a number, a whole number, a flag and a tensor that it replaces; one is never changed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(2))
        self.register_buffer("calls", torch.tensor(5))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("other", torch.zeros(1))
        self.register_buffer("still", torch.arange(3.0))
        self.register_buffer("none", None)

    def forward(self, value: float) -> None:
        self.level.add_(value)
        self.calls.add_(1)
        self.flag.fill_(True)
        self.other = self.other + value


def test_the_mean_is_that_of_the_microbatches_own_results() -> None:
    model = Counts()
    other, still = model.other, model.still
    mean = MeanBuffers(model)
    for microbatch, value in enumerate([1.0, 2.0, 6.0]):
        model(value)
        mean.take(microbatch)
        assert [float(model.level[0]), int(model.calls), bool(model.flag), float(model.other)] == [1.0, 5, False, 0.0]
    mean.settle(3, 1)
    assert model.level.tolist() == [4.0, 4.0] and model.other.tolist() == [3.0]
    assert int(model.calls) == 6 and model.calls.dtype == torch.int64 and bool(model.flag)
    assert model.other is other and model.still is still and model.none is None


def test_a_microbatch_without_a_change_counts_as_one_of_none() -> None:
    model = Counts()
    mean = MeanBuffers(model)
    mean.take(0)
    model(4.0)
    mean.take(1)
    mean.settle(2, 1)
    assert model.level.tolist() == [3.0, 3.0] and int(model.calls) == 6


def test_a_step_that_is_not_settled_leaves_no_trace() -> None:
    model = Counts()
    before = {name: buffer.clone() for name, buffer in state_items(model)}
    mean = MeanBuffers(model)
    model(4.0)
    mean.take(0)
    assert all(torch.equal(buffer, before[name]) for name, buffer in state_items(model))


def test_a_complex_buffer_that_changes_is_refused_and_one_that_does_not_is_not() -> None:
    model = nn.Module()
    model.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
    mean = MeanBuffers(model)
    mean.take(0)
    model.turns.mul_(2)
    with pytest.raises(SpecError, match="buffer turns: is complex and changes; exact mode averages real ones"):
        mean.take(1)
