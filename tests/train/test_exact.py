"""Exact mode under attack, and over changes of layout: the same bits everywhere, or a refusal; nothing silent."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from meshwright.errors import MeshwrightWarning, NonFiniteError
from meshwright.parallel.grid import RESOLUTION
from meshwright.spec.layout import parse_layout
from meshwright.spec.load import from_table
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.train.state import digest_of
from meshwright.train.trainer import Trainer
from train.matrix import table_of
from train.parity import distance, gradients_of, largest_distances, recipe_table, train
from train.runs import run_in
from train.small import CLASSES, WIDTH, Points, small_table, whole_run

LAYOUTS = ("single", "ddp2", "zero1x2", "zero2x3", "hsdp2x2")


def on(*layouts: str) -> Any:
    """One process and these in `make test`, all of LAYOUTS in `make matrix`; each is in the sample of some test."""
    every = pytest.param(LAYOUTS, id="all", marks=pytest.mark.matrix)
    return pytest.mark.parametrize("layouts", [pytest.param(("single", *layouts), id=" ".join(layouts)), every])


Batch = Mapping[str, torch.Tensor]


def attacked(model: str, layout: str, steps: int, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """12 microbatches of 2 samples a step in order, fp32, AdamW, clipped, exact."""
    degrees = parse_layout(layout)
    table = small_table(
        steps,
        model={"build": f"test_exact:{model}"},
        data={"build": "test_exact:Scaled", "shuffle": False},
        loss={"build": "test_exact:loss"},
        batch={"global_batch_size": 24, "microbatch_size": 2},
        precision={"compute": "fp32"},
        layout={name: getattr(degrees, name) for name in ("dp_replicate", "dp_shard", "zero_stage")},
        train={"reduction": "exact"},
    )
    for section, values in changes.items():
        table[section] = table.get(section, {}) | values
    return table


class Scaled(Points):
    """Samples whose losses are scaled: those of step `step` by `factor`, and sample `bad` by NaN."""

    def __init__(self, step: int = -1, factor: float = 1.0, bad: int = -1) -> None:
        super().__init__(240, dtype="float32")
        self.step, self.factor, self.bad = step, factor, bad

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        scale = self.factor if i // 24 == self.step else float("nan") if i == self.bad else 1.0
        return super().__getitem__(i) | {"scale": torch.tensor(scale), "odd": torch.tensor(i // 24 % 2 == 1)}


class Plain(nn.Module):
    """Two layers, units of ZeRO each, whose shapes divide into nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)])
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


class Sided(Plain):
    """With a layer that has a gradient in every second step alone, and one that never has."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.never = nn.Linear(WIDTH, 5), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
        out = super().forward(x, odd)
        return out + self.side(x) if bool(odd.any()) else out


class Steep(Plain):
    """Gradients of about 1e+12 and 1e-12 in different parameters; with `within`, also in the elements of one."""

    within = False

    def __init__(self) -> None:
        super().__init__()
        self.huge, self.tiny = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5))
        self.both = nn.Parameter(torch.zeros(7))

    def forward(self, x: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
        share = torch.sin(x.sum())
        steep = 1e12 * self.huge.sum() + 1e-12 * self.tiny.sum()
        slopes = torch.tensor([1e12, 1e-12, 1e6, 3e7, 1e5, -1e-12, -1e12])
        return super().forward(x, odd) + share * (steep + (slopes * self.both).sum() * self.within)


class SteepWithin(Steep):
    within = True


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = model(batch["x"], batch["odd"]), batch["labels"]
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    scales = batch["scale"][:, None].expand_as(labels).flatten()
    kept = labels.flatten() != -100
    return (each * scales)[kept].sum(), kept.sum()


def outcome(world: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on every layout: state to the bit, each step's numbers, what is said, how it ends."""
    trainer = Trainer(from_table(table), world)
    stream, steps, error, gradients = trainer.stream(0, trainer.recipe.train.steps), [], "", []
    trainer.optimizer.register_step_pre_hook(lambda *_: gradients.append(gradients_of(trainer)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for _ in range(trainer.recipe.train.steps):
                result = trainer.stepper.step(stream)
                steps.append((result.loss.hex(), result.grad_norm.hex(), result.skipped.split("(")[0]))
        except NonFiniteError as problem:
            error = str(problem).replace(f"rank {problem_rank(str(problem))}", "rank R")
    state = trainer.state
    digests = [digest_of(pieces, True) for pieces in (state.weights(), state.moments())]
    texts = [str(w.message) for w in said if issubclass(w.category, MeshwrightWarning)]
    return {
        "same": (steps, error, *digests),
        "said": texts,
        "gradients": gradients,
        "idle": trainer.stepper.idle,
        "grid": trainer.stepper.gradients.state(),
    }


def problem_rank(text: str) -> str:
    """The rank that an error names, which is another one on other layouts."""
    return text.partition("rank ")[2].partition(",")[0]


def on_all(run_ranks, model: str, steps: int, layouts: Sequence[str], **changes: Any) -> dict[str, Any]:
    """The outcome on one process, after all layouts have been found to agree with it."""
    first: dict[str, Any] = {}
    for layout in layouts:
        ranks = run_ranks(parse_layout(layout).world_size, outcome, attacked(model, layout, steps, **changes))
        first = first or ranks[0]
        for rank, each in enumerate(ranks):
            assert each["same"] == first["same"], layout
            assert each["grid"] == first["grid"] and each["idle"] == first["idle"], layout
            assert each["said"] == (first["said"] if rank == 0 else []), layout
    return first


@on("ddp2", "zero2x3")
def test_gradients_of_1e12_and_1e_minus_12_in_different_parameters_are_both_kept(run_ranks, layouts) -> None:
    found = on_all(run_ranks, "Steep", 3, layouts)
    assert found["said"] == []
    (fast,) = run_ranks(1, outcome, attacked("Steep", "single", 3, train={"reduction": "fast"}))
    for exact, plain in zip(found["gradients"], fast["gradients"], strict=True):
        for name in ("huge", "tiny"):  # clipped by one norm, so the ratio between them stays
            assert distance({name: exact[name]}, {name: plain[name]}) < 1e-5  # some fp32 roundings in 12 terms
    assert (
        float(found["gradients"][0]["huge"].abs().max()) > 1e20 * float(found["gradients"][0]["tiny"].abs().max()) > 0
    )


@on("zero1x2", "zero2x3")
def test_gradients_too_far_apart_in_one_parameter_are_said_to_be_lost(run_ranks, layouts) -> None:
    """2**80 between them: no sum in fp64 holds both. The answer is the same everywhere, and the user is told."""
    found = on_all(run_ranks, "SteepWithin", 3, layouts)
    (line,) = found["said"]
    assert "rounded gradients to zero that fast mode would have kept: in step 1, up to 2 elements" in line
    assert f"of both, each more than 2**{RESOLUTION} below" in line


@on("ddp2", "zero2x3")
def test_a_parameter_without_a_gradient_in_some_steps_is_left_alone_in_these(run_ranks, layouts) -> None:
    found = on_all(run_ranks, "Sided", 4, layouts, optimizer={"weight_decay": 0.5})
    assert [("side.weight" in gradients) for gradients in found["gradients"]] == [False, True, False, True]
    assert found["idle"] == ["never.bias", "never.weight"]
    (again,) = [line for line in found["said"] if "side" in line]
    assert "step 2 is computed again: side.bias (and 1 more) has a gradient for the first time" in again


@pytest.mark.parametrize(
    ("action", "layouts"),
    [
        ("stop", ("single", "ddp2", "zero3x3")),
        ("skip", ("single", "zero1x2", "hsdp2x2")),
        pytest.param("skip", LAYOUTS, marks=pytest.mark.matrix),
    ],
)
def test_nan_on_one_rank_stops_or_skips_everywhere_and_changes_nothing(run_ranks, action: str, layouts) -> None:
    """Sample 61 is in step 3, microbatch 6 of 12: another rank's on each layout."""
    found = on_all(run_ranks, "Plain", 4, layouts, data={"bad": 61}, train={"on_nonfinite": action})
    steps, error, *_ = found["same"]
    if action == "skip":
        assert [bool(skipped) for *_, skipped in steps] == [False, False, True, False] and not error
    else:
        assert "step 3: the loss is not finite (rank R, microbatch 6)" in error and len(steps) == 2


@pytest.mark.parametrize(
    ("factor", "layouts"),
    [
        (1e7, ("single", "ddp2", "zero2x3")),
        pytest.param(1e7, LAYOUTS, marks=pytest.mark.matrix),
        (1e-9, ("single", "zero3x2")),
        (1e30, ("single", "zero1x3")),
    ],
)
def test_a_step_that_leaves_the_grid_is_computed_again_alike_on_every_layout(run_ranks, factor, layouts) -> None:
    """In step 7 all gradients are `factor` times as large, in step 8 as before."""
    found = on_all(run_ranks, "Plain", 9, layouts, data={"step": 6, "factor": factor})
    assert [line.partition(":")[0] for line in found["said"]] == [f"step {n} is computed again" for n in (7, 8)]
    assert ("above" if factor > 1 else "below") in found["said"][0]
    assert ("below" if factor > 1 else "above") in found["said"][1]


def test_a_gradient_that_overflows_fp32_is_refused(run_ranks) -> None:
    found = on_all(run_ranks, "Plain", 9, ("single", "zero3x2"), data={"step": 6, "factor": 3e38})
    steps, error, *_ = found["same"]
    assert "step 7: the " in error and "is not finite" in error and len(steps) == 6


def test_validating_in_between_leaves_the_sums_exact(run_ranks) -> None:
    """A pass without gradients turns FSDP's switches; the next microbatches must find them as before."""
    digests = {}
    for layout in ("single", "zero2x2", "zero3x3"):
        table = attacked("Plain", layout, 4, validation={"fraction": 0.1, "every_steps": 1})
        ranks = run_ranks(parse_layout(layout).world_size, whole_run, table)
        digests[layout] = {(summary["weights_sha256"], summary["validation_loss"]) for *_, summary in ranks}
    assert digests["single"] == digests["zero2x2"] == digests["zero3x3"]


ELEMENTWISE = [name for name, known in OPTIMIZERS.items() if known.elementwise]


def sample(names: Sequence[str], always: Sequence[str]) -> list[Any]:
    """All for `make matrix`, some for `make test`."""
    return [pytest.param(name, marks=[] if name in always else pytest.mark.matrix) for name in names]


@pytest.mark.parametrize("name", sample(ELEMENTWISE, ("sgd", "adamw", "nadam", "asgd", "rprop")))
def test_every_elementwise_optimizer_has_one_state_on_all_layouts(run_ranks, name: str) -> None:
    """With decay and a group of its own, where it has decay at all."""
    options = {"weight_decay": 0.1} if "weight_decay" in OPTIMIZERS[name].options else {}
    section = {"name": name, "lr": 0.01, "max_grad_norm": 0.3, **options}
    section |= {"groups": [{"pattern": "*.bias", "lr": 0.02}]}
    found = []
    for layout in ("single", "zero1x2", "zero3x3"):
        table = attacked("Plain", layout, 3) | {"optimizer": section}
        found += [each["same"] for each in run_ranks(parse_layout(layout).world_size, outcome, table)]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("name", sample([*ELEMENTWISE, "muon"], ("adamw", "rmsprop", "muon")))
def test_every_optimizer_trains_a_cut_model_in_fast_mode_as_in_one_process(run_ranks, name: str) -> None:
    tables = {}
    for layout in ("single", "zero1x2", "zero3x3"):
        table = attacked("Matrices", layout, 4, train={"reduction": "fast"}, precision={"compute": "fp64"})
        table |= {"data": {"build": "train.small:Points", "workers": 0}, "loss": {"build": "train.small:loss"}}
        tables[layout] = table | {"optimizer": {"name": name, "lr": 0.01, "max_grad_norm": 0.3}}
    (single,) = run_ranks(1, train, tables["single"])
    # fp64 sums in another order differ by 1e-16; Muon orthogonalises in bf16, whatever the type, of 3 digits
    bound = 3e-3 if name == "muon" else 1e-11
    for layout in ("zero1x2", "zero3x3"):
        for record in run_ranks(parse_layout(layout).world_size, train, tables[layout]):
            far = largest_distances(record, single)
            assert all(x <= bound for x in far.values()), (layout, far)


class Matrices(nn.Module):
    """Muon takes matrices alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 7, bias=False), nn.Linear(7, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def curves(world: Any, table: Mapping[str, Any]) -> list[float]:
    return train(world, table).losses


@pytest.mark.matrix
def test_exact_and_fast_curves_agree_over_200_steps(run_ranks) -> None:
    """With SGD, whose steps are proportional to the gradient, fp32 roundings of 1e-7 a step add up to below 1e-5."""
    found = {}
    for reduction in ("fast", "exact"):
        table = recipe_table("gpt2", "fp32", "sgd", 200, train={"reduction": reduction})
        table["optimizer"] = table["optimizer"] | {"lr": 0.02}
        found[reduction] = run_ranks(2, curves, table, limit_s=200.0)[0]
    assert found["fast"][-1] < 0.98 * found["fast"][0]
    far = max(abs(a - b) / b for a, b in zip(found["exact"], found["fast"], strict=True))
    assert far < 1e-5


CHANGES = (
    *("single", "zero3x2", "pp2", "ddp2", "zero3x2+pp2", "zero1x3", "hsdp2x2", "ddp2+pp2", "zero2x2", "zero3x4"),
    *("zero1x3+pp2", "ddp3", "zero3x3"),
)


@pytest.mark.parametrize("changes", [CHANGES[1:4], pytest.param(CHANGES, marks=pytest.mark.matrix)], ids=len)
def test_a_run_that_changes_its_layout_every_4_steps_ends_as_the_undisturbed_one(run_ranks, tmp_path, changes) -> None:
    steps = 4 * len(changes)
    keeps = {"checkpoint": {"every_steps": 4, "keep_last": len(changes)}}
    one = table_of("single", "llama", "fp32", hf="", exact=True, steps=steps) | keeps
    run_ranks(1, run_in, one, str(tmp_path / "one"))
    for i, layout in enumerate(changes):
        table = table_of(layout, "llama", "fp32", hf="", exact=True, steps=steps) | keeps
        table["train"] = table["train"] | {"stop_after": 4 * (i + 1)}
        run_ranks(parse_layout(layout).world_size, run_in, table, str(tmp_path / "many"), i > 0)
    for step in range(4, steps + 1, 4):
        one_manifest, many = (manifest(tmp_path / name, step) for name in ("one", "many"))
        assert many["layout"] == changes[step // 4 - 1]
        for key in ("weights_sha256", "files", "grid", "tokens", "samples"):
            assert many[key] == one_manifest[key], (step, key)
    assert len(set(changes)) == len(changes)


def manifest(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"checkpoints/step-{step:08d}/manifest.json").read_text())
    return found
