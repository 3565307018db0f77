"""Faults that other tools have had where weights are cut over ranks; each named by its row of known_faults.csv."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import meshwright
from meshwright.errors import CheckpointError, MeshwrightError, RankDisagreement, SpecError
from meshwright.models.anatomy import parameters_in_order, tied_groups
from meshwright.parallel.leaves import local, rows_here
from meshwright.spec.layout import parse_layout
from meshwright.spec.load import from_table
from meshwright.train.evaluate import evaluate
from meshwright.train.replicas import require_equal_weights
from meshwright.train.run import begin_run
from meshwright.train.trainer import Parts, Trainer
from ranks import RanksFailed
from train.matrix import BOUNDS
from train.parity import Record, joined_ids, largest_distances, record_of
from train.runs import gathered, run_in
from train.small import CLASSES, WIDTH, Net, Points, by_hand, cross_entropy, loss, small_table

BOUND = 1e-11
"""fp64 sums in another order differ by 1e-16 of themselves; a few steps let that grow."""

STAGES = ("zero1x2", "zero2x2", "zero3x2")

Batch = Mapping[str, torch.Tensor]


def table_on(layout: str, model: str = "Odd", steps: int = 2, **changes: Any) -> dict[str, Any]:
    """A module of this file on a layout, 24 samples a step in 12 microbatches; fp64, AdamW, clipped."""
    degrees = parse_layout(layout)
    names = ("dp_replicate", "dp_shard", "zero_stage")
    where = {name: getattr(degrees, name) for name in names} | changes.pop("cut", {})
    build = {"build": f"test_known_faults_sharding:{model}"}
    many = {"global_batch_size": 24, "microbatch_size": 2} | changes.pop("batch", {})
    return small_table(steps, model=build, layout=where, batch=many, **changes)


def exact_on(layout: str, model: str = "Odd", steps: int = 2, **changes: Any) -> dict[str, Any]:
    """The same in exact mode, where any layout's files are any other's."""
    return table_on(layout, model, steps, train={"reduction": "exact"}, **changes)


def trained(world: Any, tables: list[dict[str, Any]]) -> list[Record]:
    return [record_of(Trainer(from_table(table), world)) for table in tables]


def size_of(layout: str) -> int:
    return parse_layout(layout).world_size


class Gated(nn.Module):
    """A fused weight: rows 0 .. 3 are the gate's, rows 4 .. 7 the other half's."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.down = nn.Linear(WIDTH, 8), nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fused(x).chunk(2, dim=-1)
        return self.down(torch.sigmoid(gate) * up)


def loaded(world: Any, tables: list[dict[str, Any]], folder: str) -> list[dict[str, torch.Tensor]]:
    """Weights and optimizer state of each, whole, right after resuming."""
    found = []
    for table in tables:
        run = begin_run(from_table(table), Path(folder), resume=True, world=world, progress=False)
        with contextlib.closing(run):
            state = run.trainer.state
            found.append(gathered([*state.weights(), *state.moments()]))
    return found


def test_b071_halves_of_a_fused_weight_stay_in_order_on_any_number_of_ranks(run_ranks, tmp_path) -> None:
    """Saved on 1 and on 2 ranks they are the same bytes, and 1 and 4 ranks load what 2 saved."""
    for layout in ("single", "zero3x2"):
        run_ranks(size_of(layout), run_in, exact_on(layout, "Gated"), str(tmp_path / layout))
    names = ("model.safetensors", "optimizer.safetensors")
    of_one, of_two = (
        [(tmp_path / layout / "checkpoints/step-00000002" / name).read_bytes() for name in names]
        for layout in ("single", "zero3x2")
    )
    assert of_one == of_two
    saved = {
        k: t for name in names for k, t in load_file(tmp_path / "zero3x2/checkpoints/step-00000002" / name).items()
    }
    assert saved["fused.weight"].shape == saved["exp_avg/fused.weight"].shape == (8, WIDTH)
    for ranks, layouts in ((1, ["single"]), (4, ["zero3x4", "hsdp2x2"])):
        tables = [exact_on(layout, "Gated", 2) for layout in layouts]
        for rank in run_ranks(ranks, loaded, tables, str(tmp_path / "zero3x2")):
            for found in rank:
                assert found.keys() == saved.keys()
                assert [
                    k for k, tensor in saved.items() if not torch.equal(found[k].reshape(tensor.shape), tensor)
                ] == []


def without(*frozen: str) -> nn.Module:
    """A model of two layers, in which some are not trained."""
    torch.manual_seed(0)
    model = Net()
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    return model


def continued(world: Any, cases: list[tuple[dict[str, Any], str, tuple[str, ...], bool]]) -> list[Any]:
    """Begin or resume with some layers frozen, train to the end; how many steps each state has seen, or a refusal."""
    told: list[Any] = []
    for table, folder, frozen, resume in cases:
        parts = Parts(model=partial(without, *frozen))
        try:
            begun = begin_run(
                from_table(table), Path(folder), resume=resume, world=world, parts=parts, progress=False
            )  # fmt: skip
        except CheckpointError as error:
            told.append(str(error))
            continue
        with contextlib.closing(begun) as run:
            stream = run.trainer.stream(run.start.step, run.end)
            for _ in range(run.start.step, run.end):
                run.step(stream)
            run.finish()
            moments = gathered(run.trainer.state.moments())
            told.append({k.removeprefix("step/"): int(t) for k, t in moments.items() if k.startswith("step/")})
    return told


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_b073_state_of_a_layer_frozen_later_is_not_dropped_and_new_layers_start_fresh(
    run_ranks, tmp_path, reduction: str
) -> None:
    """Trained whole and resumed with a frozen layer: refused by name. The reverse: the layer begins at its step 1."""
    train = {"reduction": reduction}
    first, after = {"stop_after": 2} | train, {"steps": 3} | train
    both, some = str(tmp_path / "both"), str(tmp_path / "some")
    saving = [
        (table_on("zero3x2", steps=3, train=first), both, (), False),
        (table_on("zero2x2", steps=3, train=first), some, ("first",), False),
    ]
    for rank in run_ranks(2, continued, saving):
        assert rank == [dict.fromkeys(NET, 2), dict.fromkeys(NET[2:], 2)]
    files = load_file(tmp_path / "both/checkpoints/step-00000002/optimizer.safetensors")
    assert files["exp_avg/first.weight"].count_nonzero() > 0
    kept = (tmp_path / "both/checkpoints/step-00000002/optimizer.safetensors").read_bytes()
    for layouts in (["single"], ["zero1x3", "zero3x3"]):
        refused = [(table_on(layout, steps=3, train=after), both, ("first",), True) for layout in layouts]
        (texts, *_) = run_ranks(size_of(layouts[0]), continued, refused)
        for text in texts:
            assert "has optimizer state of parameters that are not trained now" in text
            assert "first.bias, first.weight" in text and "last" not in text
    assert (tmp_path / "both/checkpoints/step-00000002/optimizer.safetensors").read_bytes() == kept
    resumed = [(table_on("zero1x3", steps=3, train=after), some, (), True)]
    for rank in run_ranks(3, continued, resumed):
        assert rank == [dict.fromkeys(NET[:2], 1) | dict.fromkeys(NET[2:], 3)]


NET = ["first.bias", "first.weight", "last.bias", "last.weight"]


class Odd(nn.Module):
    """5 rows, 3 rows and 1 row: no number of ranks divides them, and some have none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, 5), nn.Linear(5, 3), nn.Linear(3, CLASSES)
        self.scale, self.frozen = nn.Parameter(torch.ones(1)), nn.Linear(CLASSES, CLASSES)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))) * self.scale)


def rows_of_parts(world: Any, table: dict[str, Any]) -> dict[str, tuple[int, list[int], int]]:
    """Of each parameter: rows as a whole, which of them are here, and how many rows the part here has."""
    trainer = Trainer(from_table(table), world)
    facts = {}
    for name, parameter in parameters_in_order(trainer.model):
        assert isinstance(parameter, DTensor)
        n = parameter.shape[0]
        facts[name] = (n, list(range(n))[rows_here(parameter)], len(local(parameter)))
    return facts


@pytest.mark.parametrize("layout", ["zero1x2", "zero2x3", "zero3x4"])
def test_b078_b079_files_and_shapes_are_the_true_ones_where_rows_do_not_divide(run_ranks, tmp_path, layout) -> None:
    """The files of a cut model are those of one process, byte for byte: no row twice, and none that pads."""
    folders = {name: tmp_path / name for name in ("single", layout)}
    for name, folder in folders.items():
        run_ranks(size_of(name), run_in, exact_on(name), str(folder))
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, cut = ((folder / "checkpoints/step-00000002" / name).read_bytes() for folder in folders.values())
        assert one == cut
    weights = load_file(folders[layout] / "checkpoints/step-00000002/model.safetensors")
    assert {n: tuple(t.shape) for n, t in weights.items()} == {n: tuple(p.shape) for n, p in Odd().named_parameters()}
    one, cut = (json.loads((folder / "summary.json").read_text()) for folder in folders.values())
    assert one["weights_sha256"] == cut["weights_sha256"]

    ranks = run_ranks(size_of(layout), rows_of_parts, exact_on(layout))
    for name, parameter in Odd().named_parameters():
        found = [rank[name] for rank in ranks]
        assert {n for n, _, _ in found} == {parameter.shape[0]}
        assert [row for _, rows, _ in found for row in rows] == list(range(parameter.shape[0]))  # each once, in order
        assert all(len(rows) == length for _, rows, length in found)


def fill(trainer: Trainer) -> None:
    for parameter in trainer.model.parameters():
        parameter.fill_(0.3)


def shrink(trainer: Trainer) -> None:
    for _, parameter in parameters_in_order(trainer.model):
        parameter.mul_(0.5)


def shrink_leaves(trainer: Trainer) -> None:
    for leaf in trainer.stepper.gradients.leaves:
        leaf.leaf.mul_(0.5)


def average(trainer: Trainer) -> None:
    """An average of the weights before and after a change, kept as torch keeps one, and copied back."""
    kept = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    shrink(trainer)
    for mean, parameter in zip(kept, trainer.model.parameters(), strict=True):
        mean.lerp_(parameter, 0.25)
    for mean, parameter in zip(kept, trainer.model.parameters(), strict=True):
        parameter.copy_(mean)


BY_HAND: list[Callable[[Trainer], None]] = [shrink, shrink_leaves, average, fill]


def written_by_hand(world: Any, tables: list[dict[str, Any]]) -> list[list[float]]:
    """Losses of steps and validations, where someone writes into the weights in each way after each of both."""
    found = []
    for table in tables:
        trainer = Trainer(from_table(table), world)
        stream = trainer.stream(0, table["train"]["steps"])
        losses = [trainer.stepper.step(stream).loss, held_out(trainer)]
        for write in BY_HAND:
            with torch.no_grad():
                write(trainer)
            losses.append(trainer.stepper.step(stream).loss)
            with torch.no_grad():
                write(trainer)
            losses.append(held_out(trainer))
        found.append(losses)
    return found


def held_out(trainer: Trainer) -> float:
    return evaluate(trainer.stepper, trainer.source, trainer.split)[0]


def test_b080_what_is_written_into_cut_weights_reaches_the_next_forward_pass(run_ranks) -> None:
    """After a step and after a validation: stages 1 and 2 hold gathered copies in both, which must not be used."""

    changes: dict[str, Any] = {"validation": {"fraction": 0.05}, "schedule": {"name": "constant"}}

    def tables(layout: str) -> list[dict[str, Any]]:
        return [make(layout, steps=1 + len(BY_HAND), **changes) for make in (table_on, exact_on)]

    ((fast, exact),) = run_ranks(1, written_by_hand, tables("single"))
    assert all(abs(a - b) > 1e-6 for a, b in pairwise(fast[:-1]))  # each shows; the last two fill in the same
    for rank in run_ranks(2, written_by_hand, [table for layout in STAGES for table in tables(layout)]):
        assert all(losses == pytest.approx(fast, rel=BOUND) for losses in rank[::2])
        assert all(losses == exact for losses in rank[1::2])


def looked_at_and_written(world: Any, layouts: list[str]) -> list[list[float]]:
    """A loop of one's own that looks at the model's output before it writes, as where averages are swapped in."""
    found, x = [], torch.stack([Points()[i]["x"] for i in range(3)])
    for layout in layouts:
        table = table_on(layout)
        with mock.patch("meshwright.api.join_world", return_value=contextlib.nullcontext(world)):
            run = meshwright.setup(
                model=Odd, data=Points(), loss=loss, lr=0.01, global_batch_size=24, microbatch_size=2, seed=5,
                precision="fp64", loading={"workers": 0}, layout=table["layout"], progress=False,
            )  # fmt: skip
        numbers = []
        for step in run.steps(3):
            with torch.no_grad():
                numbers.append(float(run.model(x).sum()))
                for _, parameter in parameters_in_order(run.bare_model):
                    parameter.mul_(0.5)
                numbers.append(float(run.model(x).sum()))
            numbers.append(step.train().loss)
        found.append(numbers)
    return found


def test_b080_what_is_written_after_a_forward_pass_of_ones_own_is_not_lost(run_ranks) -> None:
    """That pass gathers; what is written must not be a gathered copy, which the next step frees."""
    ((one,),) = run_ranks(1, looked_at_and_written, ["single"])
    assert all(abs(a - b) > 1e-6 for a, b in pairwise(one))
    for rank in run_ranks(2, looked_at_and_written, list(STAGES)):
        for layout, numbers in zip(STAGES, rank, strict=True):
            assert numbers == pytest.approx(one, rel=BOUND), layout


class Tied(nn.Module):
    """A weight that two blocks share, one that a block shares with the head, and one block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.narrow, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks[2].weight = self.blocks[0].weight
        self.narrow.weight = self.blocks[3].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.narrow(x))


TIES = [["blocks.0.weight", "blocks.2.weight"], ["blocks.3.weight", "narrow.weight"]]


def tied(world: Any, tables: list[dict[str, Any]]) -> list[tuple[Record, list[list[str]], list[bool], tuple[str, ...]]]:
    """What was trained, the ties before and after, and what is said of the units."""
    found = []
    for table in tables:
        trainer = Trainer(from_table(table), world)
        before, record, after = tied_groups(trainer.model), record_of(trainer), tied_groups(trainer.model)
        assert before == after
        same = [
            local(trainer.model.get_parameter(a)).data_ptr() == local(trainer.model.get_parameter(b)).data_ptr()
            for a, b in TIES
        ]
        found.append((record, after, same, trainer.stepper.parallel.notes))
    return found


def test_b082_b083_a_weight_tied_across_units_gets_both_gradients_and_stays_tied(run_ranks) -> None:
    patterns = [{}, {"units": "blocks.* narrow"}]
    tables = [table_on(layout, "Tied", cut=units) for layout in STAGES for units in patterns]
    ranks = run_ranks(2, tied, tables)
    one = by_hand(tables[0], joined_ids([rank[0][0] for rank in ranks]), adamw)
    for gradients in [*one.gradients, one.weights]:  # state_dict() has a tied tensor under each of its names
        for _, second in TIES:
            gradients.pop(second, None)
    for rank in ranks:
        for i, (record, ties, same, notes) in enumerate(rank):
            assert (ties, same) == (TIES, [True, True])
            far = largest_distances(record, one)
            assert all(x <= BOUND for x in far.values()), (tables[i]["layout"], far)
            shared = "blocks.0, blocks.2, blocks.3" + (", narrow" if i % 2 else "")
            assert notes == (
                f"ZeRO gathers {shared} with the rest of the model: they share parameters with modules outside",
            )


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


def built_by_rank(world: Any, table: dict[str, Any], ranks_alike: int) -> str:
    """Each group of so many neighbouring ranks draws its own weights."""

    def build() -> nn.Module:
        torch.manual_seed(world.rank // ranks_alike)
        return Odd()

    with pytest.raises(RankDisagreement) as caught:
        Trainer(from_table(table), world, Parts(model=build))
    return str(caught.value)


@pytest.mark.parametrize(("layout", "ranks_alike"), [("hsdp2x2", 1), ("hsdp2x2", 2), ("zero3x2", 1), ("zero1x2", 1)])
def test_b091_other_weights_on_each_rank_are_refused_before_the_first_step(run_ranks, layout, ranks_alike) -> None:
    """Between replicas (2 of 2 ranks each), and between the shards of one."""
    for text in run_ranks(size_of(layout), built_by_rank, table_on(layout), ranks_alike):
        assert text.startswith("weights before the first step: differ between ranks: first.bias, ")


def drifting(world: Any, table: dict[str, Any], who: int) -> list[str]:
    """Two steps; then one rank changes one row that it has by one bit."""
    trainer = Trainer(from_table(table), world)
    stream = trainer.stream(0, 2)
    trainer.stepper.step(stream)
    require_equal_weights(trainer.model, trainer.mesh, "after a step")
    if world.rank == who:
        part = local(trainer.model.first.weight)
        part[0] = torch.nextafter(part[0], torch.full_like(part[0], math.inf))
    with pytest.raises(RankDisagreement) as caught:
        require_equal_weights(trainer.model, trainer.mesh, "after a drift")
    trainer.stepper.step(stream)  # all ranks are still in step with each other
    return str(caught.value)


@pytest.mark.parametrize("who", [0, 3])
def test_b091_a_replica_that_drifts_by_one_bit_is_found_and_the_parameter_named(run_ranks, who: int) -> None:
    for text in run_ranks(4, drifting, table_on("hsdp2x2"), who):
        assert text.startswith("weights after a drift: differ between ranks: first.weight. ")


class Chain(nn.Module):
    """Blocks of equal shapes and a head, called by ranks as `calls` says."""

    def __init__(self, calls: str = "alike") -> None:
        super().__init__()
        self.calls = calls
        self.blocks, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.blocks
        other = self.calls if dist.is_initialized() and dist.get_rank() == 1 else ""
        if other == "swapped in validation":
            other = "" if self.training else "swapped"
        for block in {"swapped": (b, a, c), "skipped": (a, c)}.get(other, (a, b, c)):
            x = torch.tanh(block(x))
        for _ in range(3 if other == "often" else 1):
            out = self.head(x)
        return out


def chain_on(layout: str, calls: str, units: str = "blocks.* head") -> dict[str, Any]:
    table = table_on(layout, "Chain", steps=1, cut={"units": units})
    return table | {"model": table["model"] | {"calls": calls}}


ONE_ORDER = r"in the same order|in another order"
"""What ranks are told that call other modules than their neighbours; see parallel/calls.py and train/blame.py."""


@pytest.mark.parametrize("layout", STAGES)
def test_b099_a_unit_called_more_often_on_one_rank_is_an_error_and_no_deadlock(run_ranks, layout: str) -> None:
    """Head once on rank 0, and 3 times on rank 1. The time-out of 6 s is for the stage that waits."""
    with pytest.raises((MeshwrightError, RanksFailed), match=ONE_ORDER):
        run_ranks(2, trained, [chain_on(layout, "often")], timeout_s=6.0)


@pytest.mark.parametrize("layout", STAGES)
def test_b099_units_of_equal_shapes_called_in_swapped_order_are_never_trained(run_ranks, layout: str) -> None:
    """Each rank then computes with what another one has under the other name, and no collective complains."""
    with pytest.raises((MeshwrightError, RanksFailed), match=ONE_ORDER) as caught:
        run_ranks(2, trained, [chain_on(layout, "swapped")], timeout_s=6.0)
    if isinstance(caught.value, RankDisagreement):
        assert "the units of ZeRO" in str(caught.value) and "No weight was changed" in str(caught.value)


def validated(world: Any, table: dict[str, Any]) -> float:
    return held_out(Trainer(from_table(table), world))


@pytest.mark.parametrize("layout", ["zero1x2", "zero3x2"])
def test_b099_units_called_in_swapped_order_in_validation_alone_are_refused_too(run_ranks, layout: str) -> None:
    """No weight is changed by it, but the loss is that of no model."""
    table = chain_on(layout, "swapped in validation") | {"validation": {"fraction": 0.2}}
    with pytest.raises((MeshwrightError, RanksFailed), match=ONE_ORDER):
        run_ranks(2, validated, table, timeout_s=6.0)


@pytest.mark.parametrize("layout", STAGES)
def test_b099_a_unit_that_one_rank_does_not_call_is_named(run_ranks, layout: str) -> None:
    """Its neighbour's next gathers are of equal shapes, so that the backend notices nothing."""
    with pytest.raises(SpecError, match=r"rank 1: 1 of 3 units of ZeRO \(blocks\.1\): were not called in a microbatch"):
        run_ranks(2, trained, [chain_on(layout, "skipped", "blocks.*")], timeout_s=6.0)


def test_b099_where_a_skipped_unit_makes_the_backend_give_up_it_is_told_where_ranks_stood(run_ranks) -> None:
    """A block of one rank meets the head of the other, of another shape; or the message above, if it is first."""
    told = r"rank 0 in forward \(blocks\.2\), rank 1 in forward \(head\).*in the same order|1 of 4 units of ZeRO"
    with pytest.raises((MeshwrightError, RanksFailed), match=told):
        run_ranks(2, trained, [chain_on("zero3x2", "skipped")], timeout_s=6.0)


def test_b099_the_same_chain_trains_where_ranks_call_alike(run_ranks) -> None:
    ranks = run_ranks(2, trained, [chain_on(layout, "alike") for layout in STAGES])
    one = by_hand(table_on("single", "Chain", 1), joined_ids([rank[0] for rank in ranks]), adamw)
    for records in ranks:
        for record in records:
            assert all(x <= BOUND for x in largest_distances(record, one).values())


class Routed(Points):
    """Samples in order: the first half of each step of 24 goes to any of 4 experts, the second to expert 0 alone."""

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        expert = i % 4 if i % 24 < 12 else 0
        return super().__getitem__(i) | {"expert": torch.tensor(expert)}


class ExpertBlock(nn.Module):
    """Experts that no token of a microbatch goes to are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        hidden, out = self.norm(x), x.clone()
        for number, each in enumerate(self.experts):
            if (rows := expert == number).any():
                out[rows] = out[rows] + torch.tanh(each(hidden[rows]))
        return out


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(ExpertBlock() for _ in range(2)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, expert)
        return self.head(x)


def routed_loss(model: nn.Module, batch: Batch) -> Any:
    return cross_entropy(model(batch["x"], batch["expert"]), batch["labels"])


def experts_on(layout: str, compute: str = "fp64", **changes: Any) -> dict[str, Any]:
    here = "test_known_faults_sharding"
    data = {"build": f"{here}:Routed", "shuffle": False, "dtype": "float64" if compute == "fp64" else "float32"}
    changes |= {"data": data, "loss": {"build": f"{here}:routed_loss"}, "precision": {"compute": compute}}
    return table_on(layout, "Experts", **changes)


@pytest.mark.parametrize("compute", ["fp64", "bf16"])
def test_b100_experts_that_a_rank_does_not_use_keep_nobody_waiting(run_ranks, compute: str) -> None:
    """4 experts, and all tokens of rank 1 go to expert 0: steps end, and gradients are those of one process."""
    syncs = ("last", "every") if compute == "fp64" else ("every",)
    cases = [(layout, sync) for layout in STAGES for sync in syncs]
    ranks = run_ranks(2, trained, [experts_on(layout, compute, train={"sync": sync}) for layout, sync in cases])
    assert {Routed()[i]["expert"].item() for step in ranks[1][0].ids for i in step} == {0}
    ((one,),) = run_ranks(1, trained, [experts_on("single", compute)])
    for case, *records in zip(cases, *ranks, strict=True):
        assert joined_ids(records) == one.ids
        for record in records:
            far = largest_distances(record, one)
            assert all(far[name] <= BOUNDS[compute][name] for name in far), (case, far)


def test_b100_experts_named_as_units_are_refused_by_name(run_ranks) -> None:
    """Then each is gathered by a collective of its own, and a rank that does not use it would not come."""
    table = experts_on("zero3x2", cut={"units": "blocks.*.experts.*"})
    with pytest.raises(SpecError, match=r"units of ZeRO \(blocks\.0\.experts\..*were not called in a microbatch"):
        run_ranks(2, trained, [table], timeout_s=6.0)


class Direct(nn.Module):
    """Two weights whose gradients are 3 and 4, whatever the data."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Parameter(torch.ones(2))


def three_and_four(model: Direct, batch: Batch) -> Any:
    rows = len(batch["x"])
    return (model.pair * model.pair.new_tensor([3.0, 4.0])).sum() * rows, rows


NORM_LAYOUTS = {2: [*STAGES], 3: ["zero3x3"], 4: ["hsdp2x2", "zero2x4"]}


@pytest.mark.parametrize("ranks", NORM_LAYOUTS)
def test_b102_the_norm_reported_is_that_of_all_ranks_parts(run_ranks, ranks: int) -> None:
    """One gradient on each of two ranks, 3 and 4: 5 on both. And of a model with frozen and tiny parameters."""
    direct = [
        table_on(layout, "Direct", loss={"build": "test_known_faults_sharding:three_and_four"})
        for layout in NORM_LAYOUTS[ranks]
    ]
    odd = [table_on(layout, optimizer={"max_grad_norm": 0.02}) for layout in NORM_LAYOUTS[ranks]]
    found = run_ranks(ranks, trained, [*direct, *odd])
    one = by_hand(odd[0], joined_ids([records[-1] for records in found]), adamw)
    assert min(one.norms) > 0.02  # so that it clips
    for of_layout in zip(*found, strict=True):
        assert all(record.norms == of_layout[0].norms for record in of_layout)
    for records in found:
        for record in records[: len(direct)]:
            assert record.norms == pytest.approx([5.0, 5.0], rel=1e-15)
        for record in records[len(direct) :]:
            far = largest_distances(record, one)
            assert all(x <= BOUND for x in far.values()), far


class Momentum(torch.optim.Optimizer):
    """A user's own: what it is given are the parameters themselves, cut as they are."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["mean"] = state.get("mean", torch.zeros_like(parameter)).lerp(parameter.grad, 0.5)
                    parameter.sub_(state["mean"] * group["lr"])


def own_optimizer(world: Any, tables: list[dict[str, Any]]) -> list[tuple[Record, list[float]]]:
    """Train with an optimizer of one's own, and clip what it is given once more by torch's helper."""
    found = []
    for table in tables:
        table |= {"optimizer": {"name": "sgd", "lr": 0.1, "max_grad_norm": 0.02}}
        trainer, norms = Trainer(from_table(table), world, Parts(optimizer=Momentum)), list[float]()

        def clip(optimizer: torch.optim.Optimizer, *_: Any, norms: list[float] = norms) -> None:
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            norm = nn.utils.clip_grad_norm_(held, 0.01)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))

        trainer.optimizer.register_step_pre_hook(clip)
        found.append((record_of(trainer), norms))
    return found


def test_b103_an_optimizer_of_ones_own_gets_clipped_gradients_and_may_clip_them_again(run_ranks) -> None:
    (((one, norms),),) = run_ranks(1, own_optimizer, [table_on("single")])
    assert norms == pytest.approx([0.02, 0.02], rel=1e-3)  # CLIP_EPSILON is 1e-6 beside norms near 0.05
    for ranks, layouts in ((2, STAGES), (4, ["hsdp2x2"])):
        for found in run_ranks(ranks, own_optimizer, [table_on(layout) for layout in layouts]):
            for record, seen in found:
                assert seen == pytest.approx(norms, rel=BOUND)
                far = largest_distances(record, one)
                assert all(x <= BOUND for x in far.values()), far
