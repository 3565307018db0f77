"""Buffers: batch statistics over ranks, stand-ins that leave no trace, buffers that drift apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

from meshwright.spec.load import from_table
from meshwright.train.buffers import KeptBuffers
from meshwright.train.evaluate import evaluate
from meshwright.train.trainer import Trainer
from train.parity import Record, train
from train.small import SLOTS, WIDTH, Net, Points, small_table, whole_run


class Normed(nn.Module):
    """A batch norm over the samples of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(SLOTS * WIDTH), Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x.flatten(1)).view_as(x))


def normed(steps: int, size: int = 101, **changes: Any) -> dict[str, Any]:
    return small_table(
        steps, model={"build": "test_buffers:Normed"}, data={"build": "train.small:Points", "size": size}, **changes
    )


def test_running_statistics_are_averaged_over_ranks_and_the_user_is_told_what_a_batch_norm_sees(run_ranks) -> None:
    table = normed(1, batch={"global_batch_size": 12, "microbatch_size": 6})
    ranks: list[Record] = run_ranks(2, train, table)
    apart = [record.weights["norm.running_mean"] for record in ranks]
    assert not torch.equal(*apart)
    x = [torch.stack([Points()[i]["x"].flatten() for i in record.ids[0]]) for record in ranks]
    wanted = 0.1 * (x[0].mean(0) + x[1].mean(0)) / 2  # torch's momentum is 0.1, and the statistics began at 0
    for state, said, summary in run_ranks(2, whole_run, table):
        assert torch.allclose(state["norm.running_mean"], wanted, rtol=0, atol=1e-15)  # fp64
        assert summary["weights_sha256"]
        if said:
            assert "1 batch norm layers (norm, ...) take their statistics from each microbatch of 6 samples" in said
            assert "not from the global batch of 12" in said and "GroupNorm" in said and "differ" not in said
    assert [bool(said) for _, said, _ in run_ranks(2, whole_run, table)] == [True, False]


def test_no_warning_where_the_microbatch_is_the_batch_or_there_is_no_batch_norm(run_ranks) -> None:
    for table in (normed(1, batch={"global_batch_size": 6, "microbatch_size": 6}), small_table(1)):
        assert run_ranks(1, whole_run, table)[0][1] == ""


def test_a_stand_in_leaves_no_trace_in_statistics_and_needs_no_more_rows_than_others(run_ranks) -> None:
    """14 samples, steps of 12: the last has one microbatch of 2, and the second rank a stand-in for it."""
    table = normed(2, size=14, batch={"global_batch_size": 12, "microbatch_size": 2})
    table["data"]["last_batch"] = "keep"
    (one,), two = run_ranks(1, train, table), run_ranks(2, train, table)
    assert two[1].ids[1] == [] and len(two[0].ids[1]) == 2
    first = run_ranks(2, train, table | {"train": {"steps": 1, "seed": 5}})
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(two[1].weights[name], first[1].weights[name])
        assert not torch.equal(two[0].weights[name], first[0].weights[name])
    assert two[0].losses == two[1].losses == pytest.approx(one.losses, rel=1e-12)  # the batch norm sees the same 2
    state, said, _ = run_ranks(2, whole_run, table)[0]
    assert "differ" not in said and state["norm.num_batches_tracked"] == 4


class Drifts(Net):
    """Counts its calls in a tensor that it puts in the buffer's place, and keeps a mean of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1.0
        self.level = 0.9 * self.level + 0.1 * x.mean().detach()
        return super().forward(x)


def test_b095_buffers_that_drift_apart_are_named_once_on_rank_0(run_ranks) -> None:
    table = small_table(4, model={"build": "test_buffers:Drifts"})
    table |= {"validation": {"fraction": 0.2, "every_steps": 1}}
    (_, said, _), (_, other, _) = run_ranks(2, whole_run, table)
    assert said == "warning: buffers differ between ranks, and rank 0's are saved: level\n" and other == ""
    assert run_ranks(1, whole_run, table)[0][1] == ""


def test_kept_buffers_come_back_with_their_values_and_their_tensors() -> None:
    model = Drifts()
    frozen, calls = model.register_buffer("none", None), model.calls
    kept = KeptBuffers(nn.Sequential(model, nn.BatchNorm1d(3)))
    model(torch.ones(2, SLOTS, WIDTH))
    model.calls.add_(5)
    kept.put_back()
    assert model.calls is calls and float(calls) == 0.0 and frozen is None and model.none is None


def test_kept_buffers_do_not_disturb_a_backward_pass_to_come() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("factor", torch.full((2,), 3.0))
    kept = KeptBuffers(model)
    out = (model(torch.ones(1, 2)) * model.factor).sum()  # backward needs `factor` as it was
    kept.put_back()
    out.backward()
    assert torch.equal(model.bias.grad, model.factor)


def modes(world: Any, table: dict[str, Any]) -> list[bool]:
    trainer = Trainer(from_table(table), world)
    trainer.model.norm.eval()  # frozen statistics, as in fine-tuning
    before = trainer.model.norm.running_mean.clone()
    evaluate(trainer.stepper, trainer.source, trainer.split)
    return [trainer.model.training, trainer.model.norm.training, torch.equal(before, trainer.model.norm.running_mean)]


def test_validation_puts_every_module_back_into_its_own_mode(run_ranks) -> None:
    assert run_ranks(2, modes, normed(1, validation={"fraction": 0.2})) == [[True, False, True]] * 2
