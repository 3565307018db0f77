"""Every optimizer of the table trains the same on 1 and 2 ranks, and its state survives being written down."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn as nn

from meshwright.errors import SpecError
from meshwright.models.digest import state_items
from meshwright.spec.load import from_table
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.train.optimizer import load_named_state, named_state
from meshwright.train.trainer import Trainer
from train.parity import largest_distances, train
from train.small import CLASSES, WIDTH, small_table

BOUND = 1e-11
"""fp64 sums in another order differ by 1e-16 of themselves; 3 steps let that grow."""

OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True},
    "adam": {"amsgrad": True},
    "adamw": {"amsgrad": True},
    "rmsprop": {"momentum": 0.5, "centered": True},
    "asgd": {"t0": 1.0},
    "adagrad": {"initial_accumulator_value": 0.1},
}
"""Options that give an optimizer all the state it can have."""


class Matrices(nn.Module):
    """Muon takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 6, bias=False), nn.Linear(6, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def table_of(name: str, steps: int = 3, **options: Any) -> dict[str, Any]:
    table = small_table(steps, model={"build": "test_optimizer:Matrices"} if name == "muon" else {})
    return table | {"optimizer": {"name": name, "lr": 0.02, "max_grad_norm": 0.3, **OPTIONS.get(name, {}), **options}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_makes_the_same_steps_on_one_and_two_ranks(run_ranks, name: str) -> None:
    (one,), two = run_ranks(1, train, table_of(name)), run_ranks(2, train, table_of(name))
    assert one.losses[2] != one.losses[0]
    for record in two:
        far = largest_distances(record, one)
        assert all(x <= BOUND for x in far.values()), far


def interrupted(world: Any, table: dict[str, Any]) -> dict[str, bool]:
    """Is a training that goes on from what was written down, in a new process's objects, the same to the bit?"""

    def steps(trainer: Trainer, first: int, end: int) -> None:
        stream = trainer.stream(first, end)
        for _ in range(first, end):
            trainer.stepper.step(stream)

    whole, first, second = (Trainer(from_table(table), world) for _ in range(3))
    steps(whole, 0, 4)
    steps(first, 0, 2)
    written = safetensors.torch.save({n: t.contiguous() for n, t in named_state(first.optimizer).items()})
    second.model.load_state_dict(first.model.state_dict())
    load_named_state(second.optimizer, safetensors.torch.load(written))
    del first
    steps(second, 2, 4)
    equal = {n: torch.equal(t, dict(state_items(whole.model))[n]) for n, t in state_items(second.model)}
    ours, theirs = named_state(second.optimizer), named_state(whole.optimizer)
    assert ours.keys() == theirs.keys() and ours
    return equal | {n: torch.equal(ours[n], t) and ours[n].dtype == t.dtype for n, t in theirs.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_survives_bit_for_bit_under_the_names_of_parameters(run_ranks, name: str) -> None:
    (equal,) = run_ranks(1, interrupted, table_of(name, 4))
    assert all(equal.values()), [n for n, same in equal.items() if not same]
    assert any(n.endswith("/first.weight") for n in equal)


class Own(torch.optim.Optimizer):
    """Plain descent that counts its steps in an int."""

    def __init__(self, params: Any, lr: float, half: bool = False) -> None:
        super().__init__(params, {"lr": lr, "half": half})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["calls"] = state.get("calls", 0) + 1
                    rate = group["lr"] * (0.5 if group["half"] else 1.0) / float(state["calls"])
                    parameter.sub_(parameter.grad, alpha=rate)


def own_table(**options: Any) -> dict[str, Any]:
    return small_table(4) | {"optimizer": {"build": "test_optimizer:Own", "lr": 0.02, **options}}


def test_an_optimizer_of_ones_own_trains_resumes_and_takes_options_and_groups(run_ranks) -> None:
    (equal,) = run_ranks(1, interrupted, own_table())
    assert all(equal.values())
    full, half, grouped = (
        run_ranks(n, train, own_table(**options))[0].weights
        for n, options in (
            (1, {}),
            (2, {"half": True}),
            (2, {"groups": [{"pattern": "last.*", "half": True}]}),
        )
    )
    start = run_ranks(1, train, own_table(lr=0.0))[0].weights
    moved = [{n: (w[n] - start[n]).abs().max() for n in start} for w in (full, half, grouped)]
    assert all(0.4 < moved[1][n] / moved[0][n] < 0.6 for n in start)  # later gradients differ a little
    assert all(0.9 < moved[2][n] / moved[0][n] < 1.1 for n in ("first.weight", "first.bias"))
    assert all(0.4 < moved[2][n] / moved[0][n] < 0.6 for n in ("last.weight", "last.bias"))


def groups(world: Any, table: dict[str, Any]) -> list[tuple[float, float, list[str]]]:
    optimizer = Trainer(from_table(table), world).optimizer
    return [(g["lr"], g["weight_decay"], g["param_names"]) for g in optimizer.param_groups]


def test_each_parameter_goes_to_the_first_group_that_matches_and_the_rest_to_its_own(run_ranks) -> None:
    patterns = [{"pattern": "*.bias", "weight_decay": 0.0}, {"pattern": "first.*", "lr": 0.5}]
    table = table_of("adamw", weight_decay=0.2, groups=patterns)
    table["optimizer"]["lr_scaling"] = "linear"
    table["batch"] |= {"tuned_global_batch_size": 3}
    assert run_ranks(1, groups, table) == [
        [(0.08, 0.0, ["first.bias", "last.bias"]), (2.0, 0.2, ["first.weight"]), (0.08, 0.2, ["last.weight"])]
    ]
    for bad, match in (("*.wait", "first.bias, first.weight"), ("first.*", "an earlier group has not taken")):
        with pytest.raises(SpecError, match=match):
            pattern = {"pattern": bad, "lr": 0.1}
            run_ranks(
                1,
                groups,
                table_of("adamw", groups=[{"pattern": "*", "lr": 1.0}, pattern] if bad[0] != "*" else [pattern]),
            )


def rates_and_line(world: Any, table: dict[str, Any]) -> tuple[list[float], list[list[float]], str]:
    trainer = Trainer(from_table(table), world)
    stream, inside = trainer.stream(0, 8), []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: inside.append([g["lr"] for g in trainer.optimizer.param_groups])
    )
    return [trainer.stepper.step(stream).lr for _ in range(8)], inside, trainer.lr_scaling.line


def test_rates_follow_the_schedule_in_every_group_and_scaling_says_both_numbers(run_ranks) -> None:
    table = table_of("adamw", 8, groups=[{"pattern": "last.*", "lr": 0.2}])
    table |= {"schedule": {"name": "wsd", "warmup_steps": 2, "decay_steps": 4, "final_fraction": 0.5}}
    table["optimizer"]["lr_scaling"] = "sqrt"
    table["batch"] |= {"tuned_global_batch_size": 3}  # a batch 4 times as large: a factor of 2
    shape = [0.5, 1.0, 1.0, 1.0, 1.0, 0.875, 0.75, 0.625]
    for rates, inside, line in run_ranks(2, rates_and_line, table):
        assert rates == pytest.approx([0.04 * x for x in shape], rel=1e-12)
        assert [row[0] for row in inside] == pytest.approx([0.4 * x for x in shape], rel=1e-12)  # the pattern's group
        assert [row[1] for row in inside] == rates
        assert line.startswith("lr 0.02 -> 0.04 (lr_scaling sqrt, x2): tuned at global batch 3, this run has 12.")


def no_optimizer(groups: Any, lr: float) -> Any:
    return [groups, lr]


def picky(groups: Any, lr: float) -> Any:
    raise ValueError("lr must be prime")


@pytest.mark.parametrize(
    ("build", "options", "match"),
    [
        ("no_optimizer", {}, "made a list, and a torch.optim.Optimizer is needed"),
        ("picky", {}, "cannot be made with lr: lr must be prime"),
        ("Own", {"full": True}, "cannot be made with lr, full.*unexpected keyword argument 'full'"),
        ("Owm", {}, "has no `Owm`"),
    ],
)
def test_a_build_that_makes_no_optimizer_is_refused(run_ranks, build: str, options: Any, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        run_ranks(1, train, own_table(build=f"test_optimizer:{build}", **options))


class Forgets(torch.optim.SGD):
    """Knows the first parameter alone."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__([group["params"][0] for group in params][:1], lr=lr)


class Flat(torch.optim.SGD):
    """Makes one group of its own of all parameters, the last first."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__([p for group in params for p in group["params"]][::-1], lr=lr, momentum=0.9)


def strange(groups: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([*(p for g in groups for p in g["params"]), nn.Parameter(torch.zeros(2))], lr=lr)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        ("Forgets", "Forgets: holds 1 parameters, and the model has 4 to train; it lacks first.weight, last.bias"),
        ("strange", "SGD: holds 5 parameters, and the model has 4 to train.*Give it every parameter"),
    ],
)
def test_an_optimizer_that_would_leave_weights_untrained_is_refused(run_ranks, build: str, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        run_ranks(1, train, own_table(build=f"test_optimizer:{build}"))


def test_an_optimizer_with_groups_of_its_own_keeps_its_state_under_the_right_names(run_ranks) -> None:
    (equal,) = run_ranks(1, interrupted, own_table(build="test_optimizer:Flat"))
    assert all(equal.values()) and "momentum_buffer/last.bias" in equal
