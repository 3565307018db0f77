"""Known faults of other tools with pipelines and tensor parallelism (tests/cases/known_faults.csv): ours has none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

from meshwright.errors import SpecError
from meshwright.models.digest import state_items
from meshwright.spec.load import from_table
from meshwright.train.run import begin_run
from meshwright.train.state import digest_of
from meshwright.train.trainer import Trainer
from train.parity import record_of
from train.runs import changed, rows, run_in
from train.spread_matrix import table_of

HERE = "train.test_known_faults_spread"


class Slope(nn.Module):
    """x + slope * weight, summed over a row's places: its gradient of a row is the slope."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.weight, self.slope = nn.Parameter(torch.zeros(1)), slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.slope * self.weight


class Slopes(nn.Module):
    """A chain of the user's own whose gradients are known: those of its blocks are 3 and 4."""

    def __init__(self, slopes: Iterable[float] = (3.0, 4.0)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Slope(slope) for slope in slopes)

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def through(self, x: torch.Tensor, blocks: Iterable[nn.Module], seq_len: int) -> torch.Tensor:
        for block in blocks:
            x = block(x)
        return x

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(x, self.blocks, x.shape[1])


def units() -> Slopes:
    return Slopes((1.0, 1.0))


class Rows:
    """Rows of one number."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((1,), float(i))


def total(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).sum(), len(batch)


def slopes(pp: int, microbatches: int, build: str = "Slopes", **optimizer: Any) -> dict[str, Any]:
    return {
        "model": {"build": f"{HERE}:{build}"},
        "data": {"build": f"{HERE}:Rows", "workers": 0, "shuffle": False},
        "loss": {"build": f"{HERE}:total"},
        "batch": {"global_batch_size": 8, "microbatch_size": 8 // microbatches},
        "optimizer": {"name": "sgd", "lr": 1.0, **optimizer},
        "precision": {"compute": "fp64"},
        "layout": {"pp": pp},
        "train": {"steps": 2},
        "record": {"memory": False},
    }


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_b007_accumulation_in_a_pipeline_does_not_scale_gradients_twice(run_ranks, microbatches: int) -> None:
    record = run_ranks(2, recorded, slopes(2, microbatches, "units"))[0]
    for gradients in record.gradients:
        assert [float(g) for g in gradients.values()] == [1.0, 1.0]
    assert record.losses == run_ranks(1, recorded, slopes(1, microbatches, "units"))[0].losses


def recorded(world: Any, table: dict[str, Any]) -> Any:
    return record_of(Trainer(from_table(table), world))


@pytest.mark.parametrize("model", ["llama", "gpt2 tied"])
def test_b008_the_gradient_norm_of_two_stages_is_that_of_one(run_ranks, model: str) -> None:
    one, two = (
        run_ranks(n, recorded, table_of(layout, "", model, "fp64", exact=False), limit_s=100.0)[0].norms
        for n, layout in ((1, "single"), (2, "pp2"))
    )
    assert two == pytest.approx(one, rel=1e-12)


def test_b101_stages_are_clipped_by_one_norm(run_ranks) -> None:
    ranks = run_ranks(2, recorded, slopes(2, 4, max_grad_norm=1.0))
    assert all(record.norms == [5.0, 5.0] for record in ranks)
    for gradients in ranks[0].gradients:
        assert [float(g) for g in gradients.values()] == pytest.approx([0.6, 0.8], rel=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_b084_a_table_tied_over_two_stages_stays_one(run_ranks, schedule: str) -> None:
    table = changed(table_of("pp2", schedule, "llama tied", "fp32", exact=False), train={"steps": 5})
    first, last = run_ranks(2, tables_after, table, limit_s=100.0)
    here = {**first, **last} if schedule == "1f1b" else first
    assert torch.equal(here["embedding.weight"], here["head.weight"])
    assert not torch.equal(here["embedding.weight"], first["before"])


def tables_after(world: Any, table: dict[str, Any]) -> dict[str, torch.Tensor]:
    trainer = Trainer(from_table(table), world)
    before = [t.detach().clone() for name, t in state_items(trainer.model) if name == "embedding.weight"]
    record_of(trainer)
    after = {name: t.detach().clone() for name, t in state_items(trainer.model) if name.startswith(("emb", "head"))}
    return after | dict.fromkeys(["before"][: len(before)], *before or [torch.zeros(())])


def test_b092_weights_start_equal_on_any_number_of_stages(run_ranks) -> None:
    digests = {
        run_ranks(n, first_digest, table_of(layout, "", "llama", "fp32", exact=False), limit_s=100.0)[0]
        for n, layout in ((1, "single"), (2, "pp2"), (4, "pp4"), (2, "tp2"), (4, "tp2+pp2"))
    }
    assert len(digests) == 1


def first_digest(world: Any, table: dict[str, Any]) -> str:
    return digest_of(Trainer(from_table(table), world).state.weights(), world.speaks)


def test_b126_b127_rank_0_of_a_pipeline_prints_and_records_the_loss_of_every_step(run_ranks, tmp_path) -> None:
    table = changed(table_of("pp2", "", "gpt2", "fp64", exact=False), train={"steps": 3})
    told = run_ranks(2, run_in, table, str(tmp_path / "two"), limit_s=100.0)
    one = changed(table_of("single", "", "gpt2", "fp64", exact=False), train={"steps": 3})
    run_ranks(1, run_in, one, str(tmp_path / "one"), limit_s=100.0)
    losses = [row["loss"] for row in rows(tmp_path / "two")]
    assert losses == pytest.approx([row["loss"] for row in rows(tmp_path / "one")], rel=1e-12)
    assert f"loss {losses[-1]:.4f}" in told[0].out
    assert told[1].out == told[1].err == ""


def test_b140_tp_differs_from_one_process_by_rounding_and_no_more(run_ranks) -> None:
    for compute, bound in (("fp64", 1e-12), ("fp32", 1e-5)):  # fp32: some roundings of 6e-8 in each of 9 layers
        one, two = (
            run_ranks(n, recorded, table_of(layout, "", "llama", compute, exact=False), limit_s=100.0)[0]
            for n, layout in ((1, "single"), (2, "tp2"))
        )
        assert two.losses == pytest.approx(one.losses, rel=bound)
        assert two.norms == pytest.approx(one.norms, rel=bound)


VALIDATED = {
    "model": {"n_layers": 4},
    "validation": {"fraction": 0.1, "every_steps": 6},
    "data": {"last_batch": "keep"},
}


@pytest.mark.parametrize(
    "layout", ["pp2", "tp2", *(pytest.param(w, marks=pytest.mark.matrix) for w in ("zero2x2+pp2", "tp2+pp2"))]
)
def test_validation_and_the_last_rows_of_an_epoch_are_those_of_one_process(run_ranks, tmp_path, layout: str) -> None:
    """97 rows, 9 held out: 5 full steps and one of 8 rows, in which some ranks have fewer microbatches or none."""
    found = {}
    for word in ("single", layout):
        table = changed(table_of(word, "zbv" if "pp" in word else "", "gpt2", "fp64", exact=False), **VALIDATED)
        table = changed(table, train={"steps": 7, "recompute": "none"})
        ranks = {"single": 1}.get(word, 4 if "+" in word else 2)
        run_ranks(ranks, run_in, table, str(tmp_path / word), limit_s=150.0)
        found[word] = rows(tmp_path / word)
    for ours, theirs in zip(found[layout], found["single"], strict=True):
        assert [ours[key] for key in ("samples", "tokens")] == [theirs[key] for key in ("samples", "tokens")]
        assert ours.keys() == theirs.keys()
        for key in ("loss", "validation_loss", "grad_norm"):
            if key not in theirs:
                continue
            assert ours[key] == pytest.approx(theirs[key], rel=1e-11)


class Bad(Rows):
    """The sixth row is no number."""

    def __getitem__(self, i: int) -> torch.Tensor:
        return super().__getitem__(i) if i != 5 else torch.full((1,), float("nan"))


def test_a_loss_that_is_no_number_is_named_by_its_microbatch_from_every_stage(run_ranks) -> None:
    table = changed(slopes(2, 4), data={"build": f"{HERE}:Bad"})
    assert run_ranks(2, why, table) == ["rank 1, microbatch 2"] * 2


def why(world: Any, table: dict[str, Any]) -> str:
    try:
        record_of(Trainer(from_table(table), world))
    except Exception as error:
        return str(error).partition("(")[2].partition(")")[0]
    return ""


def two_pairs(model: nn.Module, batch: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    out = model(batch)
    return [(out.sum(), len(batch)), (out.square().sum(), 2 * len(batch))]


def counted_pairs(model: nn.Module, batch: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    return two_pairs(model, batch)


counted_pairs.counts = lambda batch: [len(batch), 2 * len(batch)]  # type: ignore[attr-defined]


def test_a_loss_of_several_pairs_needs_counts_in_a_pipeline(run_ranks) -> None:
    def paired(pp: int, loss: str) -> dict[str, Any]:
        return changed(slopes(pp, 4), loss={"build": f"{HERE}:{loss}"})

    assert "must know their counts" in run_ranks(2, refusal, paired(2, "two_pairs"))[1]
    one, two = (run_ranks(n, recorded, paired(n, "counted_pairs"))[0] for n in (1, 2))
    assert two.losses == pytest.approx(one.losses, rel=1e-12)
    assert two.norms == pytest.approx(one.norms, rel=1e-12)


def refusal(world: Any, table: dict[str, Any]) -> str:
    with contextlib.suppress(RuntimeError):  # of the rank that waits for the one that refused
        try:
            record_of(Trainer(from_table(table), world))
        except SpecError as error:
            return str(error)
    return ""


class Eleven(Rows):
    """With a last step of 3 rows: a microbatch of 2, one of 1, and two that are not there."""

    def __len__(self) -> int:
        return 11


def per_row(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    out = model(batch)
    return out.square().sum() + torch.rand(()) * out.sum(), out.numel()


def test_a_loss_of_ones_own_sees_the_rows_that_there_are_and_draws_what_one_process_draws(run_ranks) -> None:
    def table(pp: int) -> dict[str, Any]:
        last = {"data": {"build": f"{HERE}:Eleven", "last_batch": "keep"}, "loss": {"build": f"{HERE}:per_row"}}
        return changed(slopes(pp, 4), optimizer={"lr": 0.01}, **last)

    one, two = (run_ranks(n, recorded, table(n))[0] for n in (1, 2))
    assert two.losses == pytest.approx(one.losses, rel=1e-12)
    assert two.norms == pytest.approx(one.norms, rel=1e-12)


class Shapes(Rows):
    """Rows of two lengths."""

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((1 + i // 2 % 2,), float(i))


def twice(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).sum() + model(batch + 1).sum(), len(batch)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"build": f"{HERE}:Shapes"}}, "rows of shapes (1,) and (2,)"),
        ({"loss": {"build": f"{HERE}:twice"}}, "calls the model 2 times"),
        ({"model": {"build": f"{HERE}:Bare"}}, "parameter scale is in none of the modules"),
        ({"model": {"build": f"{HERE}:Normed"}}, "batch norm first.0"),
        ({"model": {"build": f"{HERE}:Tied"}}, "are one parameter"),
    ],
)
def test_what_a_pipeline_would_train_otherwise_is_refused(run_ranks, changes: dict[str, Any], words: str) -> None:
    assert any(words in said for said in run_ranks(2, refusal, changed(slopes(2, 4), **changes)))


class Bare(Slopes):
    """With a parameter that is in no module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Normed(Slopes):
    """With a batch norm."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.first = nn.Sequential(nn.BatchNorm1d(1))
        self.blocks = nn.ModuleList([Slope(3.0), Slope(4.0)])


class Tied(Slopes):
    """Two blocks with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight = self.blocks[0].weight


def mixed_blocks() -> nn.Module:
    model = Slopes()
    model.blocks = nn.ModuleList([IdleSlope(3.0, True), IdleSlope(4.0, False)])
    return model


class IdleSlope(Slope):
    """May leave its weight out."""

    def __init__(self, slope: float, uses: bool) -> None:
        super().__init__(slope)
        self.uses = uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.uses else x * 1.0


def test_a_parameter_without_a_gradient_has_none_in_a_pipeline_either(run_ranks) -> None:
    """Zeros in its place would have an optimizer decay it."""
    for pp in (1, 2):
        table = changed(slopes(pp, 4, "mixed_blocks"), optimizer={"weight_decay": 0.5})
        assert [list(g) for g in run_ranks(pp, recorded, table)[0].gradients] == [["blocks.0.weight"]] * 2


class Tangled(nn.Module):
    """No chain."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[3](self.layers[0](x)) + self.layers[1](self.layers[2](x))


def test_a_model_that_is_no_chain_or_has_no_table_is_refused_by_every_rank(run_ranks) -> None:
    tangled = changed(slopes(2, 4), model={"build": f"{HERE}:Tangled"})
    assert all("is a chain" in said and "begin(input)" in said for said in run_ranks(2, refusal, tangled))
    untold = changed(tangled, layout={"pp": 1, "tp": 2})
    assert all("layout.tensor" in said for said in run_ranks(2, refusal, untold))


def by_hand(world: Any, table: dict[str, Any], folder: str) -> int:
    with contextlib.closing(
        begin_run(from_table(table), Path(folder), resume=False, world=world, progress=False)
    ) as run:
        return len(run.trainer.state.weights())


def test_every_stage_knows_all_weights_of_the_model(run_ranks, tmp_path) -> None:
    assert run_ranks(2, by_hand, slopes(2, 4), str(tmp_path)) == [2, 2]
