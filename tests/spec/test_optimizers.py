"""The table of optimizers against torch's own signatures, and the options of a recipe against the table."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from meshwright.spec.load import loads
from meshwright.spec.optimizers import OPTIMIZERS, REFUSED, Group, groups_of, may_fuse, normalised, optimizer_faults
from meshwright.spec.sections import OptimizerSection, TrainSection

FUSED_ON_CPU = ("sgd", "adam", "adamw", "adagrad")


def section(name: str = "adamw", **options: Any) -> OptimizerSection:
    groups = options.pop("groups", ())
    return OptimizerSection(name=name, lr=0.1, groups=tuple(groups), options=options)


def faults(one: OptimizerSection) -> str:
    return "\n".join(map(str, optimizer_faults(one)))


def test_every_class_of_torch_is_in_the_table_or_left_out_with_a_reason() -> None:
    optim = pytest.importorskip("torch.optim")
    classes = {
        name for name, value in vars(optim).items() if inspect.isclass(value) and issubclass(value, optim.Optimizer)
    }
    table = {known.torch_name for known in OPTIMIZERS.values()}
    assert classes - table == {"Optimizer", "LBFGS", "SparseAdam"}
    assert table <= classes
    assert {known.torch_name.lower(): known for known in OPTIMIZERS.values()} == dict(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options_and_defaults_are_torchs(name: str) -> None:
    optim = pytest.importorskip("torch.optim")
    known = OPTIMIZERS[name]
    signature = inspect.signature(getattr(optim, known.torch_name))
    theirs = {key: one.default for key, one in signature.parameters.items() if key not in ("params", "lr", *REFUSED)}
    ours = {key: option.default for key, option in known.options.items()}
    assert theirs.keys() == ours.keys()
    assert ("fused" in ours) == (name in FUSED_ON_CPU)
    assert {key: None if key == "fused" else value for key, value in ours.items()} == theirs
    assert ours.get("fused", True) is True


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_takes_the_arguments_and_steps_on_cpu(name: str, fused: bool) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(3, 3))
    weight.grad = torch.ones(3, 3)
    arguments = normalised(section(name), fused=fused)
    getattr(torch.optim, OPTIMIZERS[name].torch_name)([weight], **arguments).step()
    assert arguments["lr"] == 0.1
    assert not torch.equal(weight, torch.ones(3, 3))


@pytest.mark.parametrize("name", FUSED_ON_CPU)
def test_without_fused_a_cut_does_not_show_in_the_bits(name: str) -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    whole, gradient = torch.randn(2, 1003, generator=generator)

    def step(cut: list[int]) -> Any:
        parts = [torch.nn.Parameter(part.clone()) for part in torch.tensor_split(whole, cut)]
        optimizer = getattr(torch.optim, OPTIMIZERS[name].torch_name)(parts, **normalised(section(name)))
        for _ in range(5):
            for part, piece in zip(parts, torch.tensor_split(gradient, cut), strict=True):
                part.grad = piece.clone()
            optimizer.step()
        return torch.cat([part.detach() for part in parts])

    assert torch.equal(step([]), step([1, 502, 700]))


def test_fused_is_on_only_where_it_is_safe_and_wanted() -> None:
    assert normalised(section(), fused=True)["fused"] is True
    assert normalised(section())["fused"] is False
    assert normalised(section(foreach=True), fused=True)["fused"] is False
    for reduction, threads, may in (("fast", 1, True), ("fast", 4, True), ("exact", 1, True), ("exact", 4, False)):
        train = TrainSection(steps=1, reduction=reduction, threads_per_rank=threads)
        assert may_fuse(train) is may
    assert normalised(section(fused=False), fused=True)["fused"] is False
    assert normalised(section(fused=True))["fused"] is True
    assert "fused" not in normalised(section("radam"), fused=True)


def test_arguments_are_written_out_in_their_types() -> None:
    found = normalised(section(betas=[0, 0.95], weight_decay=1))
    assert found["betas"] == (0.0, 0.95) and isinstance(found["betas"], tuple) and isinstance(found["betas"][0], float)
    assert found["weight_decay"] == 1.0 and isinstance(found["weight_decay"], float)
    assert found["eps"] == 1e-8
    assert "foreach" not in found
    assert normalised(section("adafactor"))["eps"] == (None, 1e-3)
    assert normalised(section("muon"))["ns_steps"] == 5


def test_groups_come_in_order_with_their_own_options() -> None:
    tables = ({"pattern": "*.bias", "weight_decay": 0, "lr": 1}, {"pattern": "norm*", "betas": [0.8, 0.9]})
    found = groups_of(section(groups=tables))
    assert found == (Group("*.bias", {"weight_decay": 0.0, "lr": 1.0}), Group("norm*", {"betas": (0.8, 0.9)}))
    assert faults(section(groups=tables)) == ""


@pytest.mark.parametrize(
    ("one", "fragments"),
    [
        (section("adamm"), ["optimizer.name", "adamm", 'Nearest: "adam']),
        (section("lbfgs"), ["optimizer.name", "closure", '"adamw"']),
        (section("sgd", nesterov=True), ["optimizer.nesterov", "momentum 0 and dampening 0", "momentum = 0.9"]),
        (section("sgd", nesterov=True, momentum=0.9, dampening=0.1), ["optimizer.nesterov", "dampening 0.1"]),
        (section(fused=True, foreach=True), ["optimizer.fused", "foreach", "Drop foreach"]),
        (section(momentum=0.9), ["optimizer.momentum", "no option of adamw", "sgd, rmsprop and muon"]),
        (section(beta=[0.9, 0.95]), ["optimizer.beta", "Nearest: betas"]),
        (section(betas=[0.9]), ["optimizer.betas", "list of 2 numbers", "[0.9, 0.999]"]),
        (section(betas=0.9), ["optimizer.betas", "is 0.9", "list of 2 numbers"]),
        (section(betas=[0.9, 1.0]), ["optimizer.betas[1]", "is 1.0", "below 1.0"]),
        (section(betas=[0.9, True]), ["optimizer.betas[1]", "a boolean"]),
        (section(eps=-1e-8), ["optimizer.eps", "at least 0.0"]),
        (section(amsgrad=1), ["optimizer.amsgrad", "true or false", "Nearest: true"]),
        (section(capturable=True), ["optimizer.capturable", "CUDA graphs", "Leave it out"]),
        (section(differentiable=False), ["optimizer.differentiable", "back-propagates"]),
        (section("rprop", etas=[1.5, 0.5]), ["optimizer.etas", "[1.5, 0.5]", "[0.5, 1.2]"]),
        (section("rprop", step_sizes=[1, 0.5]), ["optimizer.step_sizes", "1 is above largest 0.5", "[0.5, 1]"]),
        (section("adafactor", eps=[0.1]), ["optimizer.eps", "list of 2 numbers"]),
        (section("adafactor", beta2_decay=0.8), ["optimizer.beta2_decay", "at most 0.0"]),
        (section("muon", ns_steps=100), ["optimizer.ns_steps", "below 100"]),
        (section("muon", adjust_lr_fn="orig"), ["optimizer.adjust_lr_fn", '"original"']),
        (section(groups=[{"weight_decay": 0}]), ["optimizer.groups[0].pattern", "required"]),
        (section(groups=[{"pattern": 3, "lr": 1}]), ["optimizer.groups[0].pattern", "required"]),
        (section(groups=[{"pattern": "a"}]), ["optimizer.groups[0]", "changes nothing"]),
        (section(groups=[{"pattern": "a", "lr": -1}]), ["optimizer.groups[0].lr", "at least 0.0"]),
        (section(groups=[{"pattern": "a", "xyz": 1}]), ["optimizer.groups[0].xyz", "no option of adamw"]),
        (section(groups=[{"pattern": "a", "fused": True}]), ["optimizer.groups[0].fused", "optimizer.fused"]),
        (
            section(groups=[{"pattern": "a", "lr": 1}, {"pattern": "a", "lr": 2}]),
            ["optimizer.groups[1].pattern", "groups[0] already"],
        ),
        (
            section("sgd", momentum=0.9, groups=[{"pattern": "a", "nesterov": True, "dampening": 0.5}]),
            ["optimizer.groups[0].nesterov", "dampening 0.5"],
        ),
    ],
)  # fmt: skip
def test_faults(one: OptimizerSection, fragments: list[str]) -> None:
    found = faults(one)
    assert found.count("\n") == 0
    for fragment in fragments:
        assert fragment in found


def test_all_faults_of_all_groups_at_once() -> None:
    found = faults(section(eps=-1, groups=[{"pattern": "a", "x": 1}, {"eps": "b"}])).splitlines()
    wheres = [line.split(": ")[0] for line in found]
    assert wheres == [
        "optimizer.eps",
        "optimizer.groups[0].x",
        "optimizer.groups[1].pattern",
        "optimizer.groups[1].eps",
    ]


def test_options_come_through_a_file() -> None:
    text = """
    model.name = "llama"
    batch.global_batch_size = 8
    train.steps = 3
    [optimizer]
    name = "sgd"
    lr = 1
    momentum = 0.9
    nesterov = true
    groups = [{ pattern = "*.bias", weight_decay = 0.5 }]
    """
    recipe = loads(text)
    assert normalised(recipe.optimizer)["nesterov"] is True
    assert groups_of(recipe.optimizer) == (Group("*.bias", {"weight_decay": 0.5}),)
