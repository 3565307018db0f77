"""Modules whose forward passes do what forward passes do, cut by ZeRO: right as in one process, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from meshwright.errors import SpecError
from meshwright.models.anatomy import tied_groups
from meshwright.parallel.leaves import local
from meshwright.spec.load import from_table
from meshwright.train.state import digest_of
from meshwright.train.trainer import Trainer
from train.parity import largest_distances, recipe_table, train
from train.small import CLASSES, SLOTS, WIDTH, cross_entropy, small_table, trained

Batch = Mapping[str, torch.Tensor]
BOUND = 1e-11
"""fp64 sums in another order differ by 1e-16 of themselves; a few steps let that grow."""


class Layered(nn.Module):
    """Three blocks, each a unit, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def block(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(block(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


class InPlace(Layered):
    """A linear layer of three dimensions returns a view, and what is changed is that view."""

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        out = block(x)
        out += x
        return out.tanh_()


class Checkpointed(Layered):
    """Recomputes by itself."""

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: torch.tanh(block(y)), x, use_reentrant=False)


class Pair(nn.Linear):
    """Returns a tuple; takes a keyword."""

    def forward(self, x: torch.Tensor, *, scale: float) -> Any:
        return super().forward(x) * scale, x.square().mean()


class Tuples(Layered):
    def block(self) -> nn.Module:
        return Pair(WIDTH, WIDTH)

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        out, extra = block(x, scale=0.7)
        return torch.tanh(out) + extra


@dataclass
class Out:
    """What Hugging Face models return: an object of tensors."""

    x: torch.Tensor


class Objects(Layered):
    """Blocks return dictionaries, and the model an object."""

    def block(self) -> nn.Module:
        return InDict(WIDTH, WIDTH)

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(block({"x": x})["x"])

    def forward(self, x: torch.Tensor) -> Any:
        return Out(super().forward(x)).x


class InDict(nn.Linear):
    def forward(self, inputs: Any) -> Any:
        return {"x": super().forward(inputs["x"])}


class DeadEnd(Layered):
    """The second block is called, and nothing depends on it."""

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        out = super().call(block, x)
        return x * 1.0 if block is self.blocks[1] else out


class Thrice(Layered):
    """Each block is called three times in a row."""

    def call(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = super().call(block, x)
        return x


class Backwards(Layered):
    """The order of the calls depends on the number of the call, and is the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks if self.calls % 2 else list(self.blocks)[::-1]:
            x = self.call(block, x)
        return self.head(x)


class Own(Layered):
    """With parameters of the model's own, a matrix of one row among them, which most ranks have nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.row = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.row + self.shift)


def loss(model: nn.Module, batch: Batch) -> Any:
    return cross_entropy(model(batch["x"]), batch["labels"])


MODELS = ("InPlace", "Checkpointed", "Tuples", "Objects", "DeadEnd", "Thrice", "Own")


def table_of(model: str, stage: int, reduction: str = "fast", **changes: Any) -> dict[str, Any]:
    layout = {"dp_shard": 2, "zero_stage": stage} if stage else {}
    table = small_table(3, model={"build": f"test_cut_models:{model}"}, layout=layout, **changes)
    return table | {"train": table["train"] | {"reduction": reduction}}


@pytest.mark.parametrize("model", MODELS)
def test_a_cut_model_trains_as_in_one_process(run_ranks, model: str) -> None:
    ((single, single_exact),) = run_ranks(1, trained, [table_of(model, 0), table_of(model, 0, "exact")])
    tables = [table_of(model, 1), table_of(model, 3), table_of(model, 2, "exact")]
    for *fast, exact in run_ranks(2, trained, tables):
        for stage, record in zip((1, 3), fast, strict=True):
            far = largest_distances(record, single)
            assert all(x <= BOUND for x in far.values()), (stage, far)
        assert (exact.losses, exact.norms) == (single_exact.losses, single_exact.norms)
        assert all(torch.equal(exact.weights[name], tensor) for name, tensor in single_exact.weights.items())


def test_the_order_of_calls_may_change_as_long_as_it_does_on_all_ranks(run_ranks) -> None:
    """The order of each rank's k-th call is that of the others' k-th."""
    records = run_ranks(2, train, table_of("Backwards", 3))
    assert all(record.losses == records[0].losses for record in records)


class Normed(Layered):
    """A batch norm inside each block: fp32 under any compute type."""

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(SLOTS))


@pytest.mark.parametrize("stage", [1, 3])
def test_batch_norms_stay_in_fp32_under_bf16(run_ranks, stage: int) -> None:
    data = {"data": {"dtype": "float32"}, "precision": {"compute": "bf16"}}
    (single,) = run_ranks(1, train, table_of("Normed", 0, **data))
    for record in run_ranks(2, train, table_of("Normed", stage, **data)):
        far = largest_distances(record, single)
        # weights that differ by an fp32 rounding may be cast to bf16 numbers 2**-8 apart
        assert far["loss"] < 1e-2 and far["gradient"] < 5e-2, far
        assert {t.dtype for n, t in record.weights.items() if "num_batches" not in n} == {torch.float32}


def outside(model: nn.Module, batch: Batch) -> Any:
    """Weight decay by hand, of parameters that no rank has whole here."""
    total, count = loss(model, batch)
    return total + 0.01 * sum(p.square().sum() for p in model.blocks.parameters()), count


def alone(model: nn.Module, batch: Batch) -> Any:
    _, count = loss(model, batch)
    return model.blocks[0].weight.square().sum(), count


@pytest.mark.parametrize("name", ["outside", "alone"])
def test_a_loss_that_uses_a_units_parameters_outside_of_it_is_refused(run_ranks, name: str) -> None:
    with pytest.raises(SpecError, match=r"uses a parameter outside the forward pass of the module.* layout.units"):
        run_ranks(2, train, table_of("Layered", 3, loss={"build": f"test_cut_models:{name}"}))


class Greedy(nn.Linear):
    """Changes what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1.0
        return super().forward(x)


class GreedyBlocks(Layered):
    def block(self) -> nn.Module:
        return Greedy(WIDTH, WIDTH)


def test_a_block_that_changes_its_input_in_place_is_refused_with_what_works(run_ranks) -> None:
    """FSDP itself hands on its inputs as views, which autograd does not let anyone change."""
    with pytest.raises(SpecError, match=r"a unit of ZeRO: changes its input in place.*x = x \+ "):
        run_ranks(2, train, table_of("GreedyBlocks", 3))


class Scalar(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))


def test_a_scalar_parameter_is_refused_with_what_works(run_ranks) -> None:
    with pytest.raises(SpecError, match=r"temperature: is a scalar.*shape \(1,\), or train with ddp"):
        run_ranks(2, train, table_of("Scalar", 2))


def sizes(world: Any, table: dict[str, Any]) -> tuple[str, int, list[list[str]]]:
    """Digest of the weights before the first step, the largest tensor that this rank keeps, and what is tied."""
    trainer = Trainer(from_table(table), world)
    kept = max(local(parameter).numel() for parameter in trainer.model.parameters())
    return digest_of(trainer.state.weights(), True), kept, tied_groups(trainer.model)


@pytest.mark.parametrize("tied", [False, True])
def test_a_reference_model_gets_memory_for_its_parts_alone(run_ranks, tied: bool) -> None:
    """Drawn tensor by tensor on every rank, which keeps its rows; a tied head stays tied, and the weights are one's."""
    table = recipe_table("llama", "fp32", "adamw", 5)
    table["model"] = table["model"] | {"tied_embeddings": tied}
    (single,) = run_ranks(1, sizes, table)
    for stage in (1, 3):
        for found in run_ranks(3, sizes, table | {"layout": {"dp_shard": 3, "zero_stage": stage}}):
            assert found[0] == single[0] and found[2] == single[2] and bool(found[2]) is tied
            assert found[1] <= -(-single[1] // 3) + 36  # a row more or less
