"""bf16 and fp16: fp32 masters, computing on cast copies, the numbers of FSDP2's policy, loss scaling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshwright.errors import NonFiniteError
from meshwright.models.anatomy import repeated_blocks
from meshwright.models.build import build_model
from meshwright.spec.load import from_table
from meshwright.train.evaluate import evaluate
from meshwright.train.loader import Cut
from meshwright.train.loss import token_cross_entropy
from meshwright.train.run import begin_run
from meshwright.train.scaler import FIRST_SCALE, GROWTH_INTERVAL, LossScaler
from meshwright.train.trainer import Trainer
from train.parity import MODELS, SEQ_LEN, largest_distances, recipe_table, train
from train.small import Net, small_table

BF16: dict[str, Any] = {"precision": {"compute": "bf16"}, "data": {"dtype": "float32"}}
FP16: dict[str, Any] = {"precision": {"compute": "fp16"}, "data": {"dtype": "float32"}}


@pytest.mark.parametrize("model", MODELS)
def test_bf16_on_two_and_three_ranks_is_bf16_on_one(run_ranks, model: str) -> None:
    table = recipe_table(model, "bf16", "sgd", steps=8)
    (single,) = run_ranks(1, train, table)
    fp32 = run_ranks(1, train, recipe_table(model, "fp32", "sgd", steps=8))[0]
    for ranks in (2, 3):
        for record in run_ranks(ranks, train, table):
            far = largest_distances(record, single)
            # Microbatches give the same bf16 gradients; their fp32 sums round by 6e-8 each. Where a weight then rounds
            # to the other bf16 neighbour (4e-3 of itself), later gradients move by some of that.
            assert far["loss"] < 1e-4 and far["gradient"] < 2e-2 and far["weight"] < 1e-4, far
    # bf16 keeps 8 bits: within half a percent of fp32, and not equal to it
    assert 0.0 < largest_distances(single, fp32)["loss"] < 5e-3


def by_fsdp2(world: Any, table: dict[str, Any]) -> dict[str, bool]:
    """Are the gradients of a microbatch, and of two, bit for bit those of FSDP2's MixedPrecisionPolicy?"""
    recipe = from_table(table)
    trainer = Trainer(recipe, world)
    model = build_model(recipe.model, seq_len=SEQ_LEN, tokenizer_vocab=None, seed=recipe.train.seed)
    mesh = dist.init_device_mesh("cpu", (1,))
    for module in [*(block for _, block in repeated_blocks(model)), model]:
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    stepper, masters, equal = trainer.stepper, list(trainer.model.named_parameters()), {}
    sums = stepper.begin(0)
    cut = Cut(trainer.order, trainer.batch, 0)
    for microbatch in list(trainer.source.stream(cut.places_of(0)))[:2]:
        stepper.backward(sums, microbatch, stepper.forward(microbatch, reduce=True), [None])
        token_cross_entropy(model, microbatch.batch)[0].backward()
        for (name, ours), (_, theirs) in zip(masters, model.named_parameters(), strict=True):
            equal[f"{microbatch.index}/{name}"] = torch.equal(ours.grad, theirs.grad.to_local())
    return equal


@pytest.mark.parametrize("model", MODELS)
def test_bf16_gradients_are_those_of_fsdp2s_policy_bit_for_bit(run_ranks, model: str) -> None:
    table = recipe_table(model, "bf16", "sgd")
    table["model"] |= {"dropout": 0.0}
    (equal,) = run_ranks(1, by_fsdp2, table)
    assert len(equal) > 20 and all(equal.values()), [name for name, same in equal.items() if not same]


class OneWeight(nn.Module):
    """A weight of 1 whose gradient is 0: what moves it is weight decay alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def nothing(model: nn.Module, batch: Any) -> Any:
    assert model.weight.dtype == torch.bfloat16
    return (model.weight * 0.0).sum(), len(batch["x"])


def test_b105_masters_move_where_bf16_weights_could_not(run_ranks) -> None:
    """lr x decay = 1e-6 a step is far below bf16's resolution at 1, which is 4e-3."""
    table = small_table(
        50,
        model={"build": "test_precision:OneWeight"},
        loss={"build": "test_precision:nothing"},
        optimizer={"lr": 1e-4, "weight_decay": 0.01},
        **BF16,
    )
    for record in run_ranks(2, train, table):
        assert record.weights["weight"].dtype == torch.float32
        # 50 roundings of a number near 1 to fp32
        assert record.weights["weight"].tolist() == pytest.approx([(1 - 1e-6) ** 50] * 3, abs=50 * 6e-8)
        assert float(record.weights["weight"][0]) < 1 - 4e-5


def small_steps(world: Any, table: dict[str, Any]) -> list[bool]:
    trainer = Trainer(from_table(table), world)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    for _ in (stream := trainer.stream(0, 2), 0):
        trainer.stepper.step(stream)
    return [not torch.equal(before[n], p) for n, p in trainer.model.named_parameters()]


def test_b105_every_weight_moves_at_a_tiny_rate(run_ranks) -> None:
    table = small_table(2, optimizer={"name": "adamw", "lr": 1e-6}, **BF16)
    assert run_ranks(1, small_steps, table) == [[True] * 4]


class Looks(Net):
    """Keeps what it saw of types."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> Any:
        self.seen = {x.dtype, self.first.weight.dtype, scale.dtype if scale is not None else None}
        out = super().forward(x)
        self.out = out.dtype
        return {"logits": out}


def looking(model: nn.Module, batch: Any) -> Any:
    out = model(batch["x"], scale=torch.ones(1))["logits"]
    assert out.dtype == torch.float32  # what a loss function sums, so that the sum has more than 3 digits
    return out.square().sum(), len(out)


def types(world: Any, table: dict[str, Any]) -> list[Any]:
    trainer = Trainer(from_table(table), world)
    model = trainer.model
    trainer.stepper.step(trainer.stream(0, 1))
    inside = [model.seen, model.out]
    trained = {p.dtype for p in model.parameters()}
    evaluate(trainer.stepper, trainer.source, trainer.split)
    evaluated = [model.seen, model.out]
    with torch.no_grad():
        outside = model(torch.zeros(1, 7, 4))["logits"].dtype
    return [inside, evaluated, trained | {p.dtype for p in model.parameters()}, outside, model.training]


def test_weights_and_inputs_are_cast_for_steps_and_validation_alone(run_ranks) -> None:
    changes: dict[str, Any] = {"validation": {"fraction": 0.2}}
    table = small_table(
        1, model={"build": "test_precision:Looks"}, loss={"build": "test_precision:looking"}, **changes, **BF16
    )
    for inside, evaluated, kept, outside, training in run_ranks(2, types, table):
        assert inside == evaluated == [{torch.bfloat16}, torch.bfloat16]
        assert kept == {torch.float32} and outside == torch.float32 and training


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net, self.layer_norm = nn.BatchNorm1d(7), Net(), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.layer_norm(self.norm(x)))


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_batch_norms_train_in_half_precision(run_ranks, compute: str) -> None:
    table = small_table(5, model={"build": "test_precision:Normed"}, **BF16 | {"precision": {"compute": compute}})
    half = run_ranks(2, train, table)[0]
    full = run_ranks(
        2, train, small_table(5, model={"build": "test_precision:Normed"}, **BF16 | {"precision": {"compute": "fp32"}})
    )[0]
    # 8 bits of bf16 in every product; statistics are sums over rounded inputs
    assert largest_distances(half, full)["loss"] < 2e-2
    assert half.weights["norm.running_var"].tolist() == pytest.approx(
        full.weights["norm.running_var"].tolist(), rel=2e-2
    )


def test_the_loss_scale_halves_on_overflow_and_doubles_after_long_success() -> None:
    scaler = LossScaler(enabled=True)
    assert scaler.scale == FIRST_SCALE
    scaler.succeeded()
    scaler.overflowed()
    assert (scaler.scale, scaler.good_steps) == (FIRST_SCALE / 2, 0)
    for _ in range(GROWTH_INTERVAL):
        scaler.succeeded()
    assert (scaler.scale, scaler.good_steps) == (FIRST_SCALE, 0)
    with pytest.raises(NonFiniteError, match=r"still overflow.*bf16"):
        for _ in range(99):
            scaler.overflowed()
    off = LossScaler(enabled=False)
    for _ in range(GROWTH_INTERVAL + 1):
        off.succeeded()
    assert off.scale == 1.0


def fp16_run(world: Any, table: dict[str, Any], folder: str, resume: bool) -> tuple[dict[str, Any], float, int]:
    run = begin_run(from_table(table), Path(folder), resume=resume, world=world, progress=False)
    scaler = run.trainer.stepper.scaler
    if not resume:
        scaler.scale = 2.0**24  # a gradient of 1e-2 is 1e5 then, above the 65504 of fp16
    began = (scaler.scale, scaler.good_steps)
    stream = run.trainer.stream(run.start.step, run.end)
    for _ in range(run.start.step, run.end):
        run.step(stream)
    summary = run.finish()
    run.close()
    return summary, *began


def test_fp16_scales_skips_overflows_together_and_carries_its_scale_over(run_ranks, tmp_path) -> None:
    table = small_table(24, **FP16)
    (whole, *_), _ = run_ranks(2, fp16_run, table, str(tmp_path / "a"), False)
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    skipped = [row.get("skipped", "") for row in rows]
    assert skipped[0] == f"fp16 overflow, loss scale now {2.0**23:g}" and not skipped[-1]
    early = sum(map(bool, skipped[:15]))
    assert early >= 2
    assert rows[-1]["loss"] < rows[0]["loss"]
    first = run_ranks(
        1, fp16_run, table | {"train": {"steps": 24, "seed": 5, "stop_after": 15}}, str(tmp_path / "b"), False
    )
    assert first[0][0]["status"] == "stopped"
    for summary, scale, good in run_ranks(2, fp16_run, table, str(tmp_path / "b"), True):
        assert scale == 2.0 ** (24 - early) and good == skipped[:15][::-1].index(next(filter(None, skipped[14::-1])))
        assert summary["loss"] == pytest.approx(whole["loss"], rel=1e-4)  # two ranks, then one and two: fp32 sums
    fp32 = run_ranks(1, train, small_table(24, **FP16 | {"precision": {"compute": "fp32"}}))[0]
    assert abs(whole["loss"] - fp32.losses[-1]) < 0.05  # the skipped steps were not made up for
