"""Runs whose memory is known: a loss that allocates so much in forward and in backward, an optimizer in its update."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshwright
from meshwright.errors import MeshwrightError
from meshwright.spec.layout import parse_layout
from meshwright.spec.load import from_table
from meshwright.spec.moments import MOMENTS
from meshwright.train import measure_cpu
from meshwright.train.measure_watch import MemoryWatch
from meshwright.train.trainer import Trainer
from train.parity import recipe_table
from train.runs import run_in
from train.small import Net, Points, cross_entropy, loss, small_table

MIB = 1 << 20
SIZES = {"forward": 1, "backward": 1, "update": 1}
"""MiB that are taken in each moment, and given back within it."""


def take(moment: str) -> None:
    torch.empty(SIZES[moment] * MIB, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")


class Taking(torch.autograd.Function):
    """Hands a scalar on."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor) -> torch.Tensor:
        take("forward")
        return total.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        take("backward")
        return gradient


def taking_loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total, count = loss(model, batch)
    return Taking.apply(total), count


class NotInTheThird:
    """A loss that is NaN in the third step of 24 samples."""

    samples = 0

    @classmethod
    def loss(cls, model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, count = taking_loss(model, batch)
        cls.samples += len(batch["x"]) * torch.distributed.get_world_size()
        return total * (float("nan") if 48 < cls.samples <= 72 else 1.0), count


class TakingSGD(torch.optim.SGD):
    """Its state is made anew in each step, as some optimizers do."""

    def step(self, closure: Any = None) -> None:
        take("update")
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["ones"] = torch.ones_like(parameter)
        super().step(closure)


def degrees(layout: str) -> dict[str, int]:
    found = parse_layout(layout)
    return {name: getattr(found, name) for name in ("dp_replicate", "dp_shard", "zero_stage")}


def ranks_of(layout: str) -> int:
    return parse_layout(layout).world_size


def taking_table(layout: str, steps: int = 3, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """24 samples a step in microbatches of 2. Exact mode takes no optimizer of one's own, and SGD takes nothing."""
    table = small_table(steps, layout=degrees(layout), loss={"build": "train.measuring:taking_loss"}, **changes)
    table["batch"] = {"global_batch_size": 24, "microbatch_size": 2}
    is_exact = table["train"].get("reduction") == "exact"
    named = {"name": "sgd"} if is_exact else {"build": "train.measuring:TakingSGD"}
    return table | {"optimizer": named | {"lr": 0.01}, "record": {"memory": True}}


def nan_table(on_nonfinite: str, steps: int) -> dict[str, Any]:
    table = taking_table("ddp2", steps, train={"on_nonfinite": on_nonfinite})
    return table | {"loss": {"build": "train.measuring:NotInTheThird.loss"}}


def llama_table(
    layout: str, model: str = "llama", compute: str = "fp32", **changes: Mapping[str, Any]
) -> dict[str, Any]:
    """24 samples a step in microbatches of 2."""
    batch = {"global_batch_size": 24, "microbatch_size": 2}
    schedule = {"warmup_steps": 0}
    table = recipe_table(model, compute, "adamw", steps=3, layout=degrees(layout), batch=batch, schedule=schedule)
    return table | {"record": {"memory": True}} | changes


def memory_of(world: Any, table: Mapping[str, Any], folder: str, sizes: Mapping[str, int] | None = None) -> Any:
    """What memory.json holds after a whole run, and the digest of its weights."""
    SIZES.update(sizes or {})
    summary = run_in(world, table, folder).summary
    path = Path(folder, "memory.json")
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None, summary["weights_sha256"]


def memories(world: Any, table: Mapping[str, Any], folder: str, sizes: Sequence[Sequence[int]]) -> list[dict[str, int]]:
    """Bytes by moment of a run for each three sizes."""
    found = []
    for i, three in enumerate(sizes):
        memory, _ = memory_of(world, table, f"{folder}/{i}", dict(zip(SIZES, three, strict=True)))
        world.pulse.beat(0, "start")
        found.append(bytes_of(memory) if world.speaks else {})
    return found


def bytes_of(memory: dict[str, Any]) -> dict[str, int]:
    assert memory["measured"] is not None, memory["because"]
    assert list(memory["measured"]) == list(MOMENTS)
    return {moment: found["measured_bytes"] for moment, found in memory["measured"].items()}


def with_broken_profiler(world: Any, table: Mapping[str, Any], folder: str) -> Any:
    """The last rank's profiler cannot be read."""

    def broken(result: Any) -> Any:
        raise LookupError("no such event")

    if world.rank == world.world_size - 1:
        measure_cpu._in_order = broken  # type: ignore[assignment]  # this process ends with the call
    return memory_of(world, table, folder)


def under_a_profiler(world: Any, table: Mapping[str, Any], folder: str) -> Any:
    """As a user would profile the run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = memory_of(world, table, folder)
    return found, any(event.name == "aten::linear" for event in profile.events())


def held_and_measured(world: Any, table: Mapping[str, Any], folder: str) -> tuple[int, int, Any]:
    """Elements of all parameters on this rank, how many parameters, and memory.json."""
    trainer = Trainer(from_table(table), world)
    parameters = list(trainer.model.parameters())
    held = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
    return sum(p.numel() for p in held), len(parameters), memory_of(world, table, folder)[0]


def profiler_after_failure(world: Any, table: Mapping[str, Any], folder: str) -> tuple[str, bool]:
    """What a run ended with, and whether a profiler is on then."""
    try:
        memory_of(world, table, folder)
    except MeshwrightError as error:
        return type(error).__name__, torch.autograd._profiler_enabled()
    return "", torch.autograd._profiler_enabled()


def own_loops(folder: str) -> None:
    """A run by `train()`, and one step by step, each with its record."""
    for name in ("whole", "apart"):
        own_loop(f"{folder}/{name}", by_hand=name == "apart")


def own_loop(folder: str, by_hand: bool) -> None:
    settings: dict[str, Any] = dict(model=Net, data=Points(60), loss=loss, lr=0.05, optimizer=TakingSGD)
    settings |= dict(global_batch_size=12, microbatch_size=2, loading={"workers": 0}, run_dir=folder)
    run = meshwright.setup(**settings, precision="fp64")
    for step in run.steps(3):
        for microbatch in step.microbatches() if by_hand else ():
            microbatch.backward(*cross_entropy(run.model(microbatch.batch["x"]), microbatch.batch["labels"]))
        step.update() if by_hand else step.train()
    run.close()


class FakeAllocator:
    """Statistics as torch's allocator on a GPU keeps them."""

    memory_reserved = max_memory_reserved = 2048

    def __init__(self) -> None:
        self.memory_allocated = self.max_memory_allocated = 0

    def take(self, size: int) -> None:
        self.memory_allocated += size
        self.max_memory_allocated = max(self.max_memory_allocated, self.memory_allocated)

    def reset(self) -> None:
        self.max_memory_allocated = self.memory_allocated


class Follower(TorchDispatchMode):
    """The most bytes in live storages that operators returned, looked at behind each operator."""

    def __init__(self, before: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._alive: dict[int, tuple[Any, int]] = {}
        self.most_bytes = 0
        self._add(before)

    def _add(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: pair for key, pair in self._alive.items() if not pair[0].expired()}
        self.most_bytes = max(self.most_bytes, sum(size for _, size in self._alive.values()))

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self._add(tree_leaves(result))
        return result


def both_ways(world: Any, table: Mapping[str, Any]) -> tuple[int, int]:
    """The most bytes in the forward pass: measured, and followed operator by operator in the step after."""
    trainer = Trainer(from_table(table), world)
    stepper, stream = trainer.stepper, trainer.stream(0, 3)
    stepper.step(stream)
    watch = stepper.watch = MemoryWatch(trainer.state, trainer.mesh.device)
    watch.due = 1
    stepper.step(stream)
    readings = watch.end()
    assert readings is not None, watch.why
    state = [value for values in trainer.optimizer.state.values() for value in values.values()]
    [microbatch] = list(stream)
    with Follower([*trainer.model.parameters(), *trainer.model.buffers(), *state]) as follower:
        stepper.forward(microbatch, reduce=True)
    return readings["forward"].measured_bytes, follower.most_bytes
