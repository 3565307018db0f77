"""A user's own loop on several ranks: whatever it calls on the way is reduced, and no misuse goes unsaid."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn

import meshwright
from meshwright.errors import RankDisagreement, SpecError
from meshwright.models.digest import state_items
from meshwright.parallel.leaves import local
from train.small import SLOTS, WIDTH, Net, Points, cross_entropy, loss

State = tuple[list[float], dict[str, torch.Tensor]]


class Normed(Net):
    """A batch norm over the samples of a microbatch, and a method that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(SLOTS * WIDTH)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x.flatten(1)).view_as(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x)


def prepare(world: Any, **changes: Any) -> Any:
    settings: dict[str, Any] = dict(model=Normed, data=Points(60), loss=loss, lr=0.05, precision="fp64", seed=5)
    settings |= dict(global_batch_size=12, microbatch_size=2, loading={"workers": 0})
    joined = contextlib.nullcontext(world)  # the pool's ranks have joined already
    with mock.patch("meshwright.api.join_world", return_value=joined):
        return meshwright.setup(**settings | changes)


def drive(world: Any, name: str, changes: dict[str, Any]) -> State:
    """Four steps of a loop from LOOPS: losses and the state of the model."""
    run = prepare(world, **changes)
    losses = []
    for step in run.steps(4):
        LOOPS[name](run, step)
        losses.append(step.loss)
    return losses, {n: local(t).clone() for n, t in state_items(run.bare_model)}


def same(ours: State, theirs: State) -> bool:
    return ours[0] == theirs[0] and all(torch.equal(ours[1][n], t) for n, t in theirs[1].items())


def each(run: Any, step: Any, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for microbatch in step.microbatches():
        microbatch.backward(*cross_entropy(logits_of(microbatch.batch["x"]), microbatch.batch["labels"]))
    step.update()


def by_parts(run: Any, step: Any) -> None:
    """Never calls the model itself: DDP, left to itself, would silently reduce nothing."""
    net = run.bare_model
    each(run, step, lambda x: net.last(torch.tanh(net.first(net.norm(x.flatten(1)).view_as(x)))))


LOOPS: dict[str, Callable[[Any, Any], Any]] = {
    "train": lambda run, step: step.train(),
    "call": lambda run, step: each(run, step, run.model),
    "method": lambda run, step: each(run, step, run.model.logits),
    "parts": by_parts,
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_calls_methods_and_parts_are_the_same_step_to_the_bit(run_ranks, ranks: int) -> None:
    states = {name: run_ranks(ranks, drive, name, {}) for name in LOOPS}
    for name, found in states.items():
        for rank, state in enumerate(found):
            assert same(state, states["train"][rank]), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_call_or_a_method_gathers_what_zero_has_cut(run_ranks, stage: int) -> None:
    layout = {"layout": {"dp_shard": 2, "zero_stage": stage}}
    states = {name: run_ranks(2, drive, name, layout) for name in ("train", "call", "method")}
    for name, found in states.items():
        for rank, state in enumerate(found):
            assert same(state, states["train"][rank]), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_hand_written_step_in_half_precision_is_the_step(run_ranks, precision: str) -> None:
    changes = {"precision": precision, "data": Points(60, dtype="float32"), "model": Net}
    whole, apart = (run_ranks(2, drive, name, changes) for name in ("train", "call"))
    assert same(apart[0], whole[0]) and same(apart[1], whole[1]) and same(apart[0], apart[1])


def test_a_hand_written_step_knows_stand_ins(run_ranks) -> None:
    """14 samples in steps of 12: the second rank has no rows in the last step of an epoch."""
    changes = {"data": Points(14), "loading": {"workers": 0, "last_batch": "keep"}}
    whole, apart = (run_ranks(2, drive, name, changes) for name in ("train", "call"))
    assert same(apart[0], whole[0]) and same(apart[1], whole[1])


def leak(world: Any, spoil: bool) -> State:
    run = prepare(world, model=Net)
    losses = []
    for step in run.steps(3):
        if spoil:  # someone looked at a gradient of the bare model before the step, and during it
            run.bare_model(torch.ones(2, SLOTS, WIDTH, dtype=torch.float64)).sum().backward()
        if step.number == 2:
            each(run, step, run.model)
        else:
            step.train()
        losses.append(step.loss)
    return losses, {n: t.detach().clone() for n, t in state_items(run.bare_model)}


def test_b051_gradients_that_lie_about_do_not_leak_into_a_step(run_ranks) -> None:
    assert same(run_ranks(2, leak, True)[1], run_ranks(2, leak, False)[1])


def stops_early(run: Any, step: Any) -> None:
    for microbatch in step.microbatches():
        microbatch.backward(*cross_entropy(run.model(microbatch.batch["x"]), microbatch.batch["labels"]))
        break
    step.update()


def forgets_the_last(run: Any, step: Any) -> None:
    iterator = step.microbatches()
    next(iterator)
    step.update()


def looks_then_trains(run: Any, step: Any) -> None:
    next(step.microbatches())
    step.train()


def twice(first: str, second: str) -> Callable[[Any, Any], None]:
    def mistake(run: Any, step: Any) -> None:
        for name in (first, second):
            each(run, step, run.model) if name == "update" else getattr(step, name)()

    return mistake


def no_scalar(run: Any, step: Any) -> None:
    for microbatch in step.microbatches():
        microbatch.backward(run.model(microbatch.batch["x"]).sum((0, 1)), 5)


def two_losses(run: Any, step: Any) -> None:
    for microbatch in step.microbatches():
        total, _ = cross_entropy(run.model(microbatch.batch["x"]), microbatch.batch["labels"])
        microbatch.backward(total, total.square())


def updates_again(run: Any, step: Any) -> None:
    each(run, step, run.model)
    step.update()


MISTAKES: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "break": (stops_early, r"step 1: has run 1 of its 3 microbatches on this rank"),
    "no backward": (forgets_the_last, r"microbatch \d of step 1: had no backward"),
    "look": (looks_then_trains, "step 1: has given out its microbatches.*step.update"),
    "train twice": (twice("train", "train"), "step 1: has been trained already"),
    "train updated": (twice("update", "train"), "step 1: has been trained already"),
    "update trained": (twice("train", "update"), "step 1: has been trained already"),
    "update twice": (updates_again, "step 1: had its update already"),
    "no scalar": (
        no_scalar,
        r"backward of microbatch \d: got a tuple of Tensor with a gradient, int; it takes a scalar",
    ),
    "two losses": (two_losses, r"got a tuple of Tensor with a gradient, Tensor with a gradient"),
}


def make(world: Any, name: str) -> None:
    run = prepare(world, model=Net)
    for step in run.steps(2):
        MISTAKES[name][0](run, step)


@pytest.mark.parametrize("name", MISTAKES)
def test_what_a_loop_must_not_do_is_said_on_ranks_too(run_ranks, name: str) -> None:
    with pytest.raises(SpecError, match=MISTAKES[name][1]):
        run_ranks(2, make, name)


def disagree(world: Any, what: str) -> None:
    other = world.rank == 1
    prepare(
        world,
        model=Net,
        data=Points(61 if other and what == "data" else 60),
        lr=0.06 if other and what == "lr" else 0.05,
    )


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("data", "samples in the data: is 60 on rank 0 and 61 on rank 1"),
        ("lr", "optimizer.lr: is 0.05 on rank 0 and 0.06"),
    ],
)
def test_ranks_that_are_told_different_things_are_refused(run_ranks, what: str, match: str) -> None:
    with pytest.raises(RankDisagreement, match=match):
        run_ranks(2, disagree, what)
