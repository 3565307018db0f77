"""A whole run on this rank: where it begins, the loop, validation, checkpoints, and how it ends.

    find where to begin (rank 0, agreed)        build the Trainer        load the checkpoint
    for each step:  train   validate?   record   save?
    summary.json
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from meshwright import __version__
from meshwright.errors import CheckpointError
from meshwright.models.digest import state_items, weights_sha256
from meshwright.spec.batch import plan_batch
from meshwright.spec.dump import to_table
from meshwright.spec.layout import resolve, section_of
from meshwright.spec.recipe import Recipe
from meshwright.train.agree import Agreement
from meshwright.train.checkpoint import load, save
from meshwright.train.evaluate import evaluate
from meshwright.train.loader import Microbatch
from meshwright.train.record import Console, Recorder, metrics_row
from meshwright.train.replicas import reconcile_buffers, require_equal_weights
from meshwright.train.run_folder import CHECKPOINTS, Start, find_start, open_folder
from meshwright.train.step import StepResult, local
from meshwright.train.trainer import Parts, Trainer
from meshwright.train.world import World


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
    return dataclasses.replace(recipe, batch=batch, layout=section_of(layout, recipe.layout.pp_schedule))


def run_recipe(recipe: Recipe, folder: Path, *, resume: bool, world: World, parts: Parts | None = None) -> dict[str, Any]:
    """Train a recipe in a run folder, from the start or from its newest good checkpoint; the same call on every rank.

    Returns:
        What summary.json holds.

    Raises:
        MeshwrightError: see `errors`; what was on disk before is whole.
    """
    agreement = Agreement(world.rank, world.world_size)
    start = agreement.on_rank_0(lambda: find_start(folder, recipe, resume=resume, hashes=True))
    run = Run(settle(recipe, start, world.world_size), folder, start, world, agreement, parts)
    try:
        return run.train()
    finally:
        run.close()


@final
class Run:
    """A run in progress.

    Args:
        recipe: settled.
        folder: run folder.
        start: where it begins.
        world: the ranks.
        agreement: how rank 0's outcomes reach them.
        parts: Python objects in place of what the recipe names.
    """

    def __init__(
        self, recipe: Recipe, folder: Path, start: Start, world: World, agreement: Agreement, parts: Parts | None = None
    ) -> None:
        self.recipe, self.folder, self.start, self.world, self.agreement = recipe, folder, start, world, agreement
        self.end = min(recipe.train.steps, recipe.train.stop_after or recipe.train.steps)
        self.console = Console(world.speaks, self.end, start.step)
        self.trainer = Trainer(recipe, world, parts)
        self.tokens, self.validation, self.seconds = 0, {}, 0.0
        self.last: StepResult | None = None
        self._saved_step: int | None = start.step if start.checkpoint else None
        self._restore()
        agreement.on_rank_0(lambda: open_folder(folder, recipe, start))
        self.recorder = Recorder(
            folder, speaks=world.speaks, tensorboard=recipe.record.tensorboard, start=start.step
        )

    def _restore(self) -> None:
        """Put the checkpoint that the run begins at into the trainer."""
        checkpoint = self.start.checkpoint
        if checkpoint is None:
            return
        self.agreement.on_rank_0(lambda: self._require_same_data(checkpoint.manifest["data"]["num_samples"]))
        load(checkpoint, self.trainer.state)
        self.tokens = int(checkpoint.manifest["tokens"])
        scaler = self.trainer.stepper.scaler
        scaler.scale, scaler.good_steps = checkpoint.manifest["loss_scale"]
        require_equal_weights(self.trainer.model, self.world.world_size, "after loading the checkpoint")

    def _require_same_data(self, before: int) -> None:
        now = self.trainer.source.num_samples
        if before != now:
            raise CheckpointError(
                f"resuming {self.folder}",
                f"the data has {now} samples, and had {before} when the checkpoint was written.",
                "The same step would train on other samples; give the run its data back.",
            )

    def train(self) -> dict[str, Any]:
        """Run to the end; returns what summary.json holds."""
        for line in [*self.trainer.lines(), *self.start.lines]:
            self.console.say(line)
        for line in self.trainer.warnings():
            self.console.warn(line)
        stream = self.trainer.stream(self.start.step, self.end)
        began = time.perf_counter()
        for step in range(self.start.step, self.end):
            self._step(step, stream)
        self.seconds = time.perf_counter() - began
        return self._finish()

    def _step(self, step: int, stream: Iterator[Microbatch]) -> None:
        began = time.perf_counter()
        result = self.trainer.stepper.step(stream)
        self.tokens, self.last = self.tokens + int(result.count), result
        samples = self.trainer.order.samples_before(result.step)
        row = metrics_row(result, tokens=self.tokens, samples=samples, seconds=time.perf_counter() - began)
        if self._is_due(result.step, self.recipe.validation.every_steps, self.trainer.split.num_held_out > 0):
            row |= self._validate()
        self.recorder.step(row)
        self.console.step(row)
        if self.recipe.train.record_samples:
            self._record_samples(result)
        if result.step == self.start.step + 1:
            self._name_idle_parameters()
        if self._is_due(result.step, self.recipe.checkpoint.every_steps, True):
            self._save(result.step)
        self.world.pulse.beat(result.step, "done")

    def _is_due(self, done: int, every: int | None, wanted: bool) -> bool:
        return wanted and (done == self.end or (every is not None and done % every == 0))

    def _validate(self) -> dict[str, Any]:
        self.world.pulse.beat(self.last.step if self.last else 0, "validation")
        reconcile_buffers(self.trainer.model, self.world.world_size)
        loss, samples = evaluate(self.trainer.stepper, self.trainer.source, self.trainer.split)
        self.validation = {"validation_loss": loss, "validation_samples": samples}
        self.console.say(f"validation at step {self.last.step if self.last else 0}: loss {loss:.4f} over {samples} samples")
        return self.validation

    def _record_samples(self, result: StepResult) -> None:
        """Write the ids that the ranks really trained on, in the order of the microbatch grid."""
        everyone = self.agreement.gather(result.ids)
        ids = [i for rank in everyone for i in rank]
        self.recorder.samples(result.step, self.trainer.order.epoch_of(result.step - 1), ids)

    def _name_idle_parameters(self) -> None:
        names = self.trainer.stepper.idle
        if names:
            listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            self.console.warn(f"{len(names)} trainable parameters got no gradient in the first step: {listed}")

    def _save(self, step: int) -> None:
        self.world.pulse.beat(step, "checkpoint")
        drifted = reconcile_buffers(self.trainer.model, self.world.world_size)
        if drifted:
            self.console.warn(f"buffers differ between ranks, and rank 0's are saved: {', '.join(drifted[:4])}")
        require_equal_weights(self.trainer.model, self.world.world_size, f"at step {step}")
        state, facts, keep = self.trainer.state, self._facts(), self.recipe.checkpoint.keep_last
        self.agreement.on_rank_0(lambda: save(self.folder / CHECKPOINTS, step, state, facts, keep))
        self._saved_step = step

    def _facts(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "meshwright": __version__,
            "layout": trainer.layout.word,
            "world_size": trainer.layout.world_size,
            "tokens": self.tokens,
            "samples": trainer.order.samples_before(self.last.step if self.last else self.start.step),
            "loss_scale": [trainer.stepper.scaler.scale, trainer.stepper.scaler.good_steps],
            "data": {"num_samples": trainer.source.num_samples, "about": trainer.about_data},
            "recipe": to_table(self.recipe),
        }

    def _finish(self) -> dict[str, Any]:
        done = self.last.step if self.last else self.start.step
        facts = self._facts()
        weights = ((name, local(tensor.detach())) for name, tensor in state_items(self.trainer.model))
        summary = {
            "status": "done" if done == self.recipe.train.steps else "stopped",
            "step": done,
            "steps": self.recipe.train.steps,
            "loss": self.last.loss if self.last else None,
            **self.validation,
            **{name: facts[name] for name in ("layout", "world_size", "tokens", "samples")},
            "weights_sha256": weights_sha256(weights) if self.world.speaks else None,
            "checkpoint": f"{CHECKPOINTS}/step-{self._saved_step:08d}" if self._saved_step is not None else None,
            "seconds": round(self.seconds, 3),
        }
        self.agreement.on_rank_0(lambda: self.recorder.summary(summary))
        self.console.close()
        self.console.say(self._closing_line(summary))
        return summary

    def _closing_line(self, summary: dict[str, Any]) -> str:
        if self.last is None:
            return f"nothing to do: step {summary['step']} of {summary['steps']} is done ({self.folder})"
        rate = (self.tokens - (int(self.start.checkpoint.manifest["tokens"]) if self.start.checkpoint else 0)) / self.seconds
        return (
            f"{summary['status']}: step {summary['step']} of {summary['steps']}, loss {self.last.loss:.4f}, "
            f"{rate:,.0f} tokens/s, in {self.folder}"
        )

    def close(self) -> None:
        """Close files and the progress bar."""
        self.console.close()
        self.recorder.close()
