"""The Python face: your model, your data, your loop.

    run = meshwright.setup(model=build_model, data=dataset, loss=loss_fn, lr=1e-3, global_batch_size=256)
    for step in run.steps(1000):
        step.train()

`meshwright.launch(main, nproc=2)` starts the ranks; the same file runs under torchrun, and alone.
"""

from __future__ import annotations

import atexit
import inspect
import multiprocessing.util
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.nn as nn

from meshwright.errors import SpecError
from meshwright.spec.load import from_table
from meshwright.train import stored
from meshwright.train.buffers import KeptBuffers
from meshwright.train.foresight import Foresight
from meshwright.train.launch import launch
from meshwright.train.loader import Batch, Microbatch
from meshwright.train.loss import LossFunction, Pair, described, is_pair
from meshwright.train.run import Run as InnerRun
from meshwright.train.run import begin_run
from meshwright.train.step import StepResult, take_step, weighed
from meshwright.train.sums import StepSums
from meshwright.train.trainer import Parts
from meshwright.train.world import World, join_world

__all__ = ["Run", "Step", "launch", "setup"]

OPEN_STEPS: Final = 10**9
"""Steps of a training whose length is not known yet."""


def setup(
    *,
    model: Callable[[], nn.Module] | nn.Module,
    data: Any,
    global_batch_size: int,
    lr: float,
    loss: LossFunction | None = None,
    optimizer: str | Mapping[str, Any] | Callable[..., torch.optim.Optimizer] = "adamw",
    microbatch_size: int | None = None,
    seed: int = 0,
    precision: str = "fp32",
    collate: Callable[[list[Any]], Any] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: bool = False,
    **sections: Mapping[str, Any],
) -> Run:
    """Prepare a training on this rank; the same call on every rank.

    Args:
        model: a function that builds the module (called under a fixed seed), or the module itself, equal on all ranks.
        data: a map-style data set: `len(data)` and `data[i]`.
        global_batch_size: samples per optimizer step, over all ranks.
        lr: peak learning rate.
        loss: f(model, batch) -> (sum, count), or a list of such pairs; token cross-entropy if None.
        optimizer: a name of torch.optim, a table of name and options, or a function (groups, lr=...) -> Optimizer.
        microbatch_size: samples per forward pass; the largest divisor up to 8 of what a rank gets if None.
        seed: seeds sample order, dropout and the building of the model.
        precision: fp32 | bf16 | fp16 | fp64.
        collate: makes a batch of a list of items; torch's default if None.
        run_dir: run folder for metrics and checkpoints; None keeps neither.
        resume: continue the newest good checkpoint of run_dir.
        progress: say on rank 0 what is going on.
        **sections: further sections of a recipe as tables: `schedule={"name": "cosine"}`, `layout=...`, `train=...`,
            `validation=...`, `checkpoint=...`, `record=...`, `data`'s other keys as `loading=...`.

    Raises:
        SpecError: something is wrong by itself; every fault at once.
    """
    table = _table(model, data, loss, optimizer, lr, sections)
    table["batch"] = {"global_batch_size": global_batch_size} | _given(microbatch_size=microbatch_size)
    table["precision"] = {"compute": precision}
    folder = Path(run_dir) if run_dir is not None else None
    if resume and folder is None:
        raise SpecError("resume = True", "needs run_dir.", "Name the folder that the run keeps its checkpoints in.")
    table["train"] = {"steps": _steps_before(folder, resume), "seed": seed} | table.get("train", {})
    recipe = from_table(table, where="setup()")
    factory = optimizer if callable(optimizer) else None
    parts = Parts(model=model, data=data, loss=loss, optimizer=factory, collate=collate)
    with ExitStack() as stack:  # a setup that is refused leaves the world again
        world = stack.enter_context(join_world(recipe.train.timeout_s))
        inner = begin_run(
            recipe, folder, resume=resume, world=world, parts=parts, progress=progress, foresight=_foresight()
        )
        stack.callback(inner.close)
        return Run(inner, leave=stack.pop_all())


def _foresight() -> Foresight:
    from meshwright.plan.forecast import forecast  # numpy columns: only a run needs them

    return Foresight(forecast=forecast)


def _steps_before(folder: Path | None, resume: bool) -> int:
    """How long the whole training is, which the user's loop says later: run.steps(n). Resuming, what it was."""
    before = stored.newest_good(folder, hashes=False)[0] if resume and folder is not None else None
    return int(before.manifest["recipe"]["train"]["steps"]) if before else OPEN_STEPS


def _table(
    model: Any, data: Any, loss: Any, optimizer: Any, lr: float, sections: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The recipe of a setup() call, as its file would say it."""
    table: dict[str, Any] = {name: dict(part) if isinstance(part, Mapping) else part for name, part in sections.items()}
    table["model"] = {"build": _path_of(model)}
    table["data"] = {"build": _path_of(data)} | table.pop("loading", {})
    if loss is not None:
        table["loss"] = {"build": _path_of(loss)}
    if isinstance(optimizer, str):
        optimizer = {"name": optimizer}
    named = {"build": _path_of(optimizer)} if callable(optimizer) else dict(optimizer)
    table["optimizer"] = {"lr": lr, **named, **table.get("optimizer", {})}
    return table


def _path_of(thing: Any) -> str:
    """`module:name` of a function, or of an object's class: what a recipe would call it."""
    named = thing if hasattr(thing, "__qualname__") else getattr(thing, "func", type(thing))
    name = str(getattr(named, "__qualname__", type(thing).__qualname__))
    path = f"{getattr(named, '__module__', '__main__')}:{name}".replace("<", "").replace(">", "")
    return path.replace("__mp_main__:", "__main__:")  # the same file, in a rank that was spawned


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@final
class Run:
    """A training that the user's own loop drives."""

    def __init__(self, inner: InnerRun, leave: ExitStack) -> None:
        self._inner = inner
        self._summary: dict[str, Any] | None = None
        # Ranks that `launch` forks end without `atexit`; multiprocessing's finalizers run there. It happens once, and
        # nothing of it keeps a run that nobody has any more.
        self._end = multiprocessing.util.Finalize(self, _end, (inner, leave), exitpriority=10)
        atexit.register(self._end)

    @property
    def world(self) -> World:
        """rank, world_size, device, ..."""
        return self._inner.world

    @property
    def model(self) -> Model:
        """The model for a hand-written step: call it, or read its attributes."""
        return Model(self._inner)

    @property
    def bare_model(self) -> nn.Module:
        """Your module itself, for export; where ZeRO cuts it a rank has parts, and `model` is what can be called."""
        trainer = self._inner.trainer
        if trainer.layout.dp_shard > 1:  # what is written into gathered copies would be lost
            trainer.stepper.parallel.settle()
        return trainer.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; its rates are set by the schedule at each step."""
        return self._inner.trainer.optimizer

    @property
    def done(self) -> int:
        """Optimizer steps done, those before a resume included."""
        return self._inner.done

    @property
    def summary(self) -> dict[str, Any]:
        """How the run ended: steps, loss, weights_sha256, ...; after the last step."""
        if self._summary is None:
            raise SpecError("run.summary", f"exists after the last step; {self.done} steps are done.")
        return self._summary

    def steps(self, total: int) -> Iterator[Step]:
        """The steps up to number `total`, where schedules end; a resumed run begins after its checkpoint's.

        Each must be trained before the next is asked for: `step.train()`, or microbatch by microbatch.
        """
        inner = self._inner
        inner.set_steps(total)
        stream = inner.trainer.stream(inner.done, inner.end)
        for number in range(inner.done + 1, inner.end + 1):
            step = Step(inner, number, stream)
            yield step
            if inner.done != number:
                raise SpecError(
                    f"step {number}", "was not trained.", "Call step.train(), or step.update() after its microbatches."
                )
        self._summary = inner.finish()

    def save(self) -> None:
        """Write a checkpoint of the steps done; call it on every rank."""
        self._inner.save()

    def close(self) -> None:
        """Close files and leave the process group. Called at exit if you do not."""
        self._end()


def _end(inner: InnerRun, leave: ExitStack) -> None:
    if inner.folder is not None and inner.unsaved:
        inner.console.warn(
            f"the loop ended at step {inner.done} of {inner.end}, and the last checkpoint does not have it; "
            "call run.save() before you leave the loop early"
        )
    leave.close()


@final
class Model:
    """The spread model as a callable: a call, of it or of a method of yours, is one forward pass of what wraps it.

    Other attributes are the module's. Where ZeRO cuts its parameters, they are whole within such a call alone.
    """

    def __init__(self, inner: InnerRun) -> None:
        self._inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.trainer.stepper.parallel.entry(_call, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner.trainer.model, name)
        if inspect.ismethod(found) and not hasattr(nn.Module, name):
            return partial(self._inner.trainer.stepper.parallel.entry, _call_method, name)
        return found


def _call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _call_method(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(model, name)(*args, **kwargs)


@final
class Step:
    """One optimizer step: `train()`, or `microbatches()` and `update()`."""

    def __init__(self, inner: InnerRun, number: int, stream: Iterator[Microbatch]) -> None:
        self._inner, self.number, self._stream = inner, number, stream
        self._mine: list[Microbatch] = []
        self._lives: list[LiveMicrobatch] = []
        self._sums: StepSums | None = None
        self._began = 0.0
        self._result: StepResult | None = None

    @property
    def result(self) -> StepResult:
        """What the step did: loss, lr, grad_norm, ...; after it."""
        if self._result is None:
            raise SpecError(f"step {self.number}", "has no result before it is trained.")
        return self._result

    @property
    def loss(self) -> float:
        """Mean loss over all samples or label tokens of the step, on all ranks."""
        return self.result.loss

    def train(self) -> StepResult:
        """Forward, backward and update, with the loss function that setup() was given."""
        self._require_fresh()
        self._result = self._inner.step(self._stream)
        return self._result

    def _require_fresh(self) -> None:
        """The stream of microbatches goes one way: what was taken from it cannot be taken again."""
        if self._result is not None:
            raise SpecError(f"step {self.number}", "has been trained already.", "Ask run.steps() for the next.")
        if self._sums is not None:
            raise SpecError(f"step {self.number}", "has given out its microbatches.", "Call step.update() after them.")

    def microbatches(self) -> Iterator[LiveMicrobatch]:
        """This rank's microbatches, for a hand-written step; each needs its `backward`."""
        self._require_fresh()
        stepper = self._inner.trainer.stepper
        if stepper.rules.exact:
            raise SpecError(
                "step.microbatches()",
                "with train.reduction exact, where a step whose gradients do not fit the grid is computed again.",
                "Nearest: step.train(), with the loss function in setup().",
            )
        if stepper.parallel.pipeline is not None:
            raise SpecError(
                "step.microbatches()",
                f"with layout.pp {stepper.mesh.layout.pp}, where a schedule takes all microbatches of a step at once.",
                "Nearest: step.train(), with the loss function in setup().",
            )
        self._began, self._sums = time.perf_counter(), stepper.begin(self.number - 1)
        self._mine = take_step(self._stream, stepper.rules.batch)
        for microbatch in self._mine:
            batch = stepper.prepare(microbatch, reduce=stepper.reduces(microbatch))
            self._lives.append(LiveMicrobatch(self._inner, self._sums, microbatch, batch))
            yield self._lives[-1]
            self._require_backward()

    def _require_backward(self) -> None:
        for live, microbatch in zip(self._lives, self._mine, strict=False):
            if not live.used:
                where = f"microbatch {microbatch.index} of step {self.number}"
                raise SpecError(where, "had no backward.", "Call its backward(sum, count).")

    def update(self) -> StepResult:
        """Combine the ranks, clip, and update; after all microbatches."""
        if self._result is not None:
            raise SpecError(f"step {self.number}", "had its update already.")
        if self._sums is None:
            raise SpecError(
                f"step {self.number}", "has no gradients.", "Run its microbatches first, or call step.train()."
            )
        self._require_backward()
        if len(self._lives) < len(self._mine):
            rule = f"has run {len(self._lives)} of its {len(self._mine)} microbatches on this rank."
            raise SpecError(f"step {self.number}", rule, "Each needs its backward before step.update().")
        stepper = self._inner.trainer.stepper
        stepper.gradients.retry()  # sums over tp; never a second pass: a loop of one's own is refused in exact mode
        self._result = stepper.finish(self._sums, self._mine, [None], replay=False)
        self._inner.after(self._result, time.perf_counter() - self._began)
        return self._result


@final
class LiveMicrobatch:
    """Rows on the device, and the way back.

    Attributes:
        batch: what the data set's items collate to.
        ids: sample ids.
        used: True once backward was called.
    """

    def __init__(self, inner: InnerRun, sums: StepSums, microbatch: Microbatch, batch: Batch) -> None:
        self._inner, self._sums, self._microbatch = inner, sums, microbatch
        self.batch, self.ids, self.used = batch, microbatch.ids, False
        self._before = None if len(self.ids) else KeptBuffers(inner.trainer.model)

    def backward(self, total: torch.Tensor, count: torch.Tensor | float) -> None:
        """Add this microbatch to the gradients.

        Args:
            total: loss summed over the microbatch's samples or label tokens, a scalar.
            count: how many there were; the step divides by the count of all microbatches of all ranks.
        """
        if self.used:
            raise SpecError(f"microbatch {self._microbatch.index}", "had its backward already.")
        if not is_pair((total, count)):
            asked = f"backward of microbatch {self._microbatch.index}"
            raise SpecError(asked, f"got {described((total, count))}; it takes a scalar sum, undivided, and a count.")
        if self._before is not None:  # the rows of a stand-in are another microbatch's
            self._before.put_back()
        pairs = weighed(self._microbatch, [Pair(total, count)])
        self._inner.trainer.stepper.backward(self._sums, self._microbatch, pairs, [None])
        self.used = True
