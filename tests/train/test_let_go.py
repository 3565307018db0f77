"""What is over is let go: a model with all that trained it, and each gradient once it has been added up."""

from __future__ import annotations

import contextlib
import gc
import io
import weakref
from collections.abc import Mapping
from typing import Any

import pytest

import meshwright
from meshwright.spec.layout import parse_layout
from meshwright.spec.load import from_table
from meshwright.train.trainer import Trainer
from train.parity import recipe_table, record_of
from train.small import Net, Points, cross_entropy, loss

LAYOUTS = [
    ("single", "fp32"),
    ("ddp2", "fp32"),
    ("ddp2", "bf16"),
    ("zero1x2", "bf16"),
    ("zero3x2", "fp32"),
    ("pp2", "fp32"),
    ("pp2", "bf16"),
    ("zero3x2+pp2", "fp32"),
    ("tp2", "fp32"),
]


def table_of(layout: str, compute: str, reduction: str = "fast") -> dict[str, Any]:
    """Two steps."""
    table = recipe_table("llama", compute, "adamw", steps=2, schedule={"warmup_steps": 1})
    degrees = parse_layout(layout)
    table["layout"] = {n: getattr(degrees, n) for n in ("dp_replicate", "dp_shard", "zero_stage", "tp", "pp")}
    table["train"] |= {"reduction": reduction}
    return table


def references_of(world: Any, table: Mapping[str, Any]) -> list[weakref.ref[Any]]:
    """Train; then only these are left."""
    trainer = Trainer(from_table(table), world)
    record_of(trainer)
    return [weakref.ref(each) for each in (trainer, trainer.model, *trainer.model.parameters())]


def alive(world: Any, table: Mapping[str, Any]) -> list[int]:
    """Which of a trainer, its model and its parameters are still there."""
    with contextlib.redirect_stderr(io.StringIO()):
        references = references_of(world, table)
    gc.collect()
    return [i for i, reference in enumerate(references) if reference() is not None]


CASES = [(*case, reduction) for case in LAYOUTS for reduction in ("fast", "exact")]


@pytest.mark.parametrize(("layout", "compute", "reduction"), [case for case in CASES if case[::2] != ("tp2", "exact")])
def test_a_trainer_that_nobody_has_any_more_is_gone_with_its_model(
    run_ranks, layout: str, compute: str, reduction: str
) -> None:
    ranks = parse_layout(layout).world_size
    assert run_ranks(ranks, alive, table_of(layout, compute, reduction)) == [[]] * ranks


def test_after_a_run_of_ones_own_the_model_can_go_and_its_gradients_are_its_own() -> None:
    model = Net().double()
    for reduction in ("fast", "exact"):
        run = meshwright.setup(
            model=model, data=Points(60), loss=loss, lr=0.05, global_batch_size=12, microbatch_size=2,
            precision="fp64", loading={"workers": 0}, train={"reduction": reduction},
        )  # fmt: skip
        for step in run.steps(2):
            step.train()
        run.close()
        watched = weakref.ref(run)
        del run, step
        gc.collect()
        assert watched() is None
        batch = Points(60)[0]
        model.zero_grad()
        cross_entropy(model(batch["x"][None]), batch["labels"][None])[0].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    watched_model = weakref.ref(model)
    del model
    gc.collect()
    assert watched_model() is None


def waiting_gradients(world: Any, table: Mapping[str, Any]) -> tuple[list[int], int]:
    """Of each backward pass of a stage, how many parameters still have a gradient when it is over; passes of a step."""
    trainer = Trainer(from_table(table), world)
    harvest: Any = trainer.stepper.gradients.harvest  # type: ignore[attr-defined]
    counts: list[int] = []
    take = harvest.take

    def counted(stage: int) -> None:
        counts.append(sum(place.parameter.grad is not None for place, _ in harvest._sources[stage]))
        take(stage)

    harvest.take = counted
    record_of(trainer)
    return counts, trainer.stepper.rules.batch.num_microbatches


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize(("layout", "compute"), [("pp2", "fp32"), ("pp2", "bf16"), ("zero1x2+pp2", "bf16")])
def test_a_stages_gradients_do_not_wait_for_each_other(run_ranks, layout: str, compute: str, reduction: str) -> None:
    """But in the first pass, or where copies in the compute type are new in each step, in the first of each."""
    for counts, passes in run_ranks(
        parse_layout(layout).world_size, waiting_gradients, table_of(layout, compute, reduction)
    ):
        begins = counts[::passes]
        assert passes > 1 and begins[0] > 0
        assert sum(counts) == sum(begins if (layout, compute) == ("pp2", "bf16") else begins[:1])
