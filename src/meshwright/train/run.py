"""A whole run on this rank: where it begins, the loop, validation, checkpoints, and how it ends.

find where to begin (rank 0, agreed)        build the Trainer        load the checkpoint
for each step:  train   validate?   record   save?
summary.json
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, final

from meshwright.errors import CheckpointError, RankDisagreement, SpecError
from meshwright.models.anatomy import with_extra_state
from meshwright.spec.batch import plan_batch
from meshwright.spec.dump import to_table
from meshwright.spec.layout import resolve, section_of
from meshwright.spec.load import from_table
from meshwright.spec.nearest import first_of
from meshwright.spec.recipe import Recipe, walk
from meshwright.train.agree import Agreement
from meshwright.train.checkpoint import load, save, tidy
from meshwright.train.evaluate import evaluate
from meshwright.train.foresight import UNKNOWN, Foresight, Seer
from meshwright.train.loader import Microbatch
from meshwright.train.measure_record import MemoryRecord
from meshwright.train.native import keep_freed_memory
from meshwright.train.record import Console, Recorder, metrics_row, require_tensorboard
from meshwright.train.replicas import reconcile_buffers
from meshwright.train.run_folder import (
    Start,
    find_start,
    last_row,
    microbatch_lines,
    open_folder,
    read_summary,
    write_recipe,
)
from meshwright.train.state import digest_of
from meshwright.train.step import StepResult
from meshwright.train.stored import CHECKPOINTS, folder_name
from meshwright.train.trainer import Parts, Trainer
from meshwright.train.world import World
from meshwright.version import __version__


def settle(recipe: Recipe, start: Start, world_size: int) -> Recipe:
    """Write out what the recipe leaves open: the layout for this world, and the microbatch.

    A microbatch that is not given stays what it was in the checkpoint, where the ranks can be dealt whole ones.
    """
    layout = resolve(recipe.layout, world_size)
    batch = recipe.batch
    if batch.microbatch_size is None and start.checkpoint is not None:
        before = start.checkpoint.manifest["recipe"]["batch"]["microbatch_size"]
        if batch.global_batch_size % (layout.dp_degree * before) == 0:
            batch = dataclasses.replace(batch, microbatch_size=before)
    batch = dataclasses.replace(batch, microbatch_size=plan_batch(batch, layout.dp_degree).microbatch_size)
    return dataclasses.replace(recipe, batch=batch, layout=section_of(layout, recipe.layout))


def run_recipe(
    recipe: Recipe, folder: Path, *, resume: bool, world: World, foresight: Foresight = UNKNOWN
) -> dict[str, Any]:
    """Train a recipe in a run folder, from the start or from its newest good checkpoint; the same call on every rank.

    Returns:
        What summary.json holds.

    Raises:
        MeshwrightError: see `errors`; what was on disk before is whole.
    """
    with closing(begin_run(recipe, folder, resume=resume, world=world, foresight=foresight)) as run:
        stream = run.trainer.stream(run.start.step, run.end)
        for _ in range(run.start.step, run.end):
            run.step(stream)
        return run.finish()


def begin_run(
    recipe: Recipe,
    folder: Path | None,
    *,
    resume: bool,
    world: World,
    parts: Parts | None = None,
    progress: bool = True,
    foresight: Foresight = UNKNOWN,
) -> Run:
    """Find where a run begins, and make it ready there; collective.

    Args:
        recipe: what to train.
        folder: run folder; None keeps no record and no checkpoints.
        resume: continue the newest good checkpoint of the folder.
        world: the ranks.
        parts: Python objects in place of what the recipe names.
        progress: say on rank 0 what is going on.
        foresight: what is known of the run.
    """
    if world.device.type == "cpu":
        keep_freed_memory()
    agreement = Agreement(world.rank, world.world_size)
    start = Start()
    if folder is not None:
        start = agreement.on_rank_0(lambda: find_start(folder, recipe, resume=resume, hashes=True))
    settled = settle(recipe, start, world.world_size)
    start = dataclasses.replace(start, lines=[*start.lines, *microbatch_lines(start, settled)])
    return Run(settled, folder, start, world, agreement, parts, progress=progress, foresight=foresight)


@final
class Run:
    """A run in progress: a Trainer with its beginning, its record and its checkpoints.

    Args:
        recipe: settled.
        folder: run folder; None keeps no record and no checkpoints.
        start: where it begins.
        world: the ranks.
        agreement: how rank 0's outcomes reach them.
        parts: Python objects in place of what the recipe names.
        progress: say on rank 0 what is going on.
        foresight: what is known of the run.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path | None,
        start: Start,
        world: World,
        agreement: Agreement,
        parts: Parts | None = None,
        *,
        progress: bool = True,
        foresight: Foresight = UNKNOWN,
    ) -> None:
        self.recipe, self.folder, self.start, self.world, self.agreement = recipe, folder, start, world, agreement
        self.end = self._end()
        if folder is not None and recipe.record.tensorboard:
            agreement.on_rank_0(require_tensorboard)
        seer = Seer(foresight.forecast if folder and world.speaks and recipe.record.memory else None)
        self.trainer = Trainer(recipe, world, parts, seer.see)
        self._require_one_training()
        self.last: StepResult | None = None
        self._tokens, self._seconds, self._row = 0, 0.0, dict[str, Any]()
        self._tokens_before, self._has_told_of_drift = 0, False
        self._saved_step = start.step if start.checkpoint else None
        self._ended: dict[str, Any] | None = None
        self._digest = ""
        self._restore()
        kept = None if self._ended else folder  # a run that has ended is looked at, and not touched
        if kept is not None:
            agreement.on_rank_0(lambda: open_folder(kept, recipe, start, foresight.plan))
            agreement.on_rank_0(lambda: tidy(kept / CHECKPOINTS, start.step, recipe.checkpoint.keep_last))
        self.recorder = Recorder(kept, speaks=world.speaks, tensorboard=recipe.record.tensorboard, start=start.step)
        self.console = Console(
            speaks=world.speaks, progress=progress, total=max(self.end, start.step), start=start.step
        )
        self.memory = MemoryRecord(kept, self.trainer, agreement, start.step, self.end, seer)
        self.trainer.stepper.warn = self.console.warn
        for line in [*foresight.lines, *self.trainer.lines(), *start.lines]:
            self.console.say(line)
        for line in [*self.trainer.warnings(), *self._unsaved()]:
            self.console.warn(line)

    def _require_one_training(self) -> None:
        """Refuse ranks that were told different things: each would train on its own idea of the order of samples."""
        mine = {path: value for path, value, _ in walk(self.recipe)}
        everyone = self.agreement.gather(mine | {"samples in the data": self.trainer.source.num_samples})
        for rank, theirs in enumerate(everyone):
            for path, value in theirs.items():
                if value != everyone[0][path]:
                    rule = f"is {everyone[0][path]!r} on rank 0 and {value!r} on rank {rank}."
                    raise RankDisagreement(path, rule, "All ranks must describe one training.")

    def _end(self) -> int:
        train = self.recipe.train
        return min(train.steps, train.stop_after or train.steps)

    def _unsaved(self) -> list[str]:
        names = [name or type(self.trainer.model).__name__ for name in with_extra_state(self.trainer.model)]
        if not names or self.folder is None:
            return []
        return [f"checkpoints hold parameters and buffers, and not the extra state of {', '.join(names[:4])}"]

    def _restore(self) -> None:
        """Put the checkpoint that the run begins at into the trainer."""
        checkpoint, folder = self.start.checkpoint, self.folder
        if checkpoint is None or folder is None:
            return
        self.agreement.on_rank_0(lambda: self._require_same_data(checkpoint.manifest["data"]))
        load(checkpoint, self.trainer.state)
        self._tokens = self._tokens_before = int(checkpoint.manifest["tokens"])
        scaler = self.trainer.stepper.scaler
        scaler.scale, scaler.good_steps = checkpoint.manifest["loss_scale"]
        self.trainer.stepper.gradients.load(checkpoint.manifest.get("grid", {}))
        self._digest = str(checkpoint.manifest["weights_sha256"])
        self.trainer.require_equal("after loading the checkpoint")
        self._row = self.agreement.on_rank_0(lambda: last_row(folder, checkpoint.step))
        if checkpoint.step >= self.end:
            self._ended = self.agreement.on_rank_0(lambda: read_summary(folder, checkpoint.step))

    def _require_same_data(self, before: Mapping[str, Any]) -> None:
        source, rule = self.trainer.source, ""
        if before["num_samples"] != source.num_samples:
            rule = f"the data has {source.num_samples} samples, and had {before['num_samples']}"
        elif before.get("crc32") is not None and before["crc32"] != self._checksum:
            rule = f"the data has {source.num_samples} samples as before, with other tokens than"
        if rule:
            raise CheckpointError(
                f"resuming {self.folder}",
                f"{rule} when the checkpoint was written.",
                "The same step would train on other samples; give the run its data back.",
            )

    @property
    def done(self) -> int:
        """Optimizer steps done, those of earlier runs in this folder included."""
        return self.last.step if self.last else self.start.step

    def set_steps(self, steps: int) -> None:
        """Say how long the whole training is, where the recipe left that to the user's loop; collective.

        Raises:
            SpecError: a rule of the recipe is broken by it, or it differs from what the checkpoint's training had.
        """
        everyone = self.agreement.gather(steps)
        if set(everyone) != {steps}:
            raise RankDisagreement(
                f"run.steps({steps})", f"ranks ask for {everyone} steps.", "Give all the same number."
            )
        if steps == self.recipe.train.steps:
            return
        if self.done > self.start.step:
            raise SpecError(
                f"run.steps({steps})",
                f"{self.done} steps of a training of {self.recipe.train.steps} are done, and schedules end there.",
                f"Nearest: run.steps({self.recipe.train.steps}).",
            )
        if self.start.checkpoint is not None:
            raise SpecError(
                f"run.steps({steps})",
                f"resumes a training of {self.recipe.train.steps} steps, where schedules end.",
                f"Nearest: run.steps({self.recipe.train.steps}).",
            )
        table = to_table(self.recipe)
        self.recipe = recipe = from_table(table | {"train": table["train"] | {"steps": steps}}, f"run.steps({steps})")
        self.trainer.stepper.rules = dataclasses.replace(self.trainer.stepper.rules, steps=steps)
        self.end = self._end()
        self.console.expect(self.end)
        self.memory.expect(self.end)
        if (folder := self.folder) is not None:
            self.agreement.on_rank_0(lambda: write_recipe(folder, recipe))

    def step(self, stream: Iterator[Microbatch]) -> StepResult:
        """Make the next step from the stream, and all that follows it."""
        began = time.perf_counter()
        result = self.trainer.stepper.step(stream)
        self.after(result, time.perf_counter() - began)
        return result

    def after(self, result: StepResult, seconds: float) -> None:
        """What follows a step: validation, record and checkpoint, where they are due; collective."""
        self.memory.after(result)
        self._seconds, self.last = self._seconds + seconds, result
        self._tokens += int(result.count) if math.isfinite(result.count) else 0
        samples = self.trainer.order.samples_before(result.step)
        row = metrics_row(result, tokens=self._tokens, samples=samples, seconds=seconds)
        if self._is_due(result.step, self.recipe.validation.every_steps) and self.trainer.split.num_held_out:
            row |= self._validate()
        self._row = row
        self.recorder.step(row)
        self.console.step(row)
        if self.recipe.train.record_samples:
            self._record_samples(result)
        if result.step == self.start.step + 1:
            self._name_idle_parameters()
        if self._is_due(result.step, self.recipe.checkpoint.every_steps):
            self.save()
        self.world.pulse.beat(result.step, "done")

    def _is_due(self, done: int, every: int | None) -> bool:
        return done == self.end or (every is not None and done % every == 0)

    def _validate(self) -> dict[str, Any]:
        self.world.pulse.beat(self.done, "validation")
        self._reconcile_buffers()
        loss, samples = evaluate(self.trainer.stepper, self.trainer.source, self.trainer.split)
        self.console.say(f"validation at step {self.done}: loss {loss:.4f} over {samples} samples")
        return {"validation_loss": loss, "validation_samples": samples}

    def _reconcile_buffers(self) -> None:
        """Make the running statistics of all ranks one, and say once which other buffers have drifted apart."""
        drifted = reconcile_buffers(self.trainer.model, self.trainer.mesh)
        if drifted and not self._has_told_of_drift:
            self._has_told_of_drift = True
            self.console.warn(f"buffers differ between ranks, and rank 0's are saved: {', '.join(drifted[:4])}")

    def _record_samples(self, result: StepResult) -> None:
        """Write the ids that the ranks really trained on, in the order of the microbatch grid."""
        everyone = self.agreement.gather(result.ids)
        ids = [i for rank in everyone for i in rank]
        self.recorder.samples(result.step, self.trainer.order.epoch_of(result.step - 1), ids)

    def _name_idle_parameters(self) -> None:
        names = self.trainer.stepper.idle
        if names:
            self.console.warn(f"{len(names)} trainable parameters got no gradient in the first step: {first_of(names)}")

    def save(self) -> None:
        """Write a checkpoint of the steps done; collective. Without a run folder, or saved already: nothing."""
        if self.folder is None or self._saved_step == self.done:
            return
        home, step, keep = self.folder / CHECKPOINTS, self.done, self.recipe.checkpoint.keep_last
        self.world.pulse.beat(step, "checkpoint")
        self.agreement.meet()
        self.trainer.stepper.parallel.settle()
        self._reconcile_buffers()
        self.trainer.require_equal(f"at step {step}")
        _, self._digest = save(home, step, self.trainer.state, self._facts(), keep, self.agreement)
        self._saved_step = step

    @cached_property
    def _checksum(self) -> int | None:
        """Of the data, read once and not at every checkpoint."""
        return self.trainer.source.checksum

    @property
    def unsaved(self) -> bool:
        """Are there steps that no checkpoint has?"""
        return self.last is not None and self._saved_step != self.done

    def _facts(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "meshwright": __version__,
            "layout": trainer.layout.word,
            "world_size": trainer.layout.world_size,
            "tokens": self._tokens,
            "samples": trainer.order.samples_before(self.done),
            "loss_scale": [trainer.stepper.scaler.scale, trainer.stepper.scaler.good_steps],
            "grid": trainer.stepper.gradients.state(),
            "data": {
                "num_samples": trainer.source.num_samples,
                "about": trainer.about_data,
                "crc32": self._checksum,
            },
            "recipe": to_table(self.recipe),
        }

    def finish(self) -> dict[str, Any]:
        """End the run with a checkpoint of its last step and summary.json; collective. Returns what that holds."""
        if self.folder is None:
            self._reconcile_buffers()
            self.trainer.require_equal(f"at step {self.done}")
            self._digest = digest_of(self.trainer.state.weights(), self.world.speaks)
        self.save()
        summary = self._ended or self.agreement.on_rank_0(self._summarise)
        self.console.close()
        self.console.say(self._closing_line(summary))
        return summary

    def _summarise(self) -> dict[str, Any]:
        """Write summary.json. The last row may be an earlier run's, killed between its last checkpoint and here."""
        facts = self._facts()
        summary = {
            "status": "done" if self.done == self.recipe.train.steps else "stopped",
            "step": self.done,
            "steps": self.recipe.train.steps,
            "loss": self._row.get("loss"),
            **{name: value for name, value in self._row.items() if name.startswith("validation_")},
            **{name: facts[name] for name in ("layout", "world_size", "tokens", "samples")},
            "weights_sha256": self._digest,
            "checkpoint": f"{CHECKPOINTS}/{folder_name(self._saved_step)}" if self._saved_step is not None else None,
            "seconds": round(self._seconds, 3),
        }
        self.recorder.summary(summary)
        return summary

    def _closing_line(self, summary: dict[str, Any]) -> str:
        where = f", in {self.folder}" if self.folder else ""
        if self.last is None:
            return f"nothing to do: step {self.done} of {self.recipe.train.steps} is done{where}"
        rate = (self._tokens - self._tokens_before) / self._seconds
        status = f"{summary['status']}: step {self.done} of {self.recipe.train.steps}, loss {self.last.loss:.4f}"
        return f"{status}, {rate:,.0f} tokens/s{where}"

    def close(self) -> None:
        """Close files and the progress bar."""
        self.memory.close()
        self.console.close()
        self.recorder.close()
