"""One optimizer step, equal on any number of ranks.

    for each microbatch of this rank:
        seed dropout from (step, microbatch, module)
        forward: pairs of (sum, count)
        backward of the sum; only the last microbatch reduces gradients over the ranks
    one all-reduce: sums, counts and non-finite flags of all ranks
    global norm; one read of everything to the host
    if not finite: stop or skip, on all ranks together
    gradients x (1 / count) x (clipping): one pass
    optimizer step at the schedule's rate

Dividing once, after the count of the whole step is known, is what makes ragged microbatches equal to one big batch.
With several pairs each has its own count, and these must be known before the first backward: see `counts.py`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, final

import torch
from torch.distributed.tensor import DTensor

from meshwright.errors import MeshwrightWarning, RunError, SpecError
from meshwright.parallel.entry import Parallel
from meshwright.parallel.fsdp import explained, used_outside
from meshwright.parallel.grid import FIRST, RESOLUTION
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.seeding import MicrobatchSeeds
from meshwright.spec.batch import BatchPlan
from meshwright.spec.moments import BACKWARD, FORWARD, UPDATE
from meshwright.spec.schedule import lr_multiplier
from meshwright.spec.sections import ScheduleSection
from meshwright.train.buffers import KeptBuffers, MeanBuffers
from meshwright.train.counts import Weights, counts_first, require_counts
from meshwright.train.loader import Batch, Microbatch, to_device
from meshwright.train.loss import LossFunction, Pair, divisor, pairs_of
from meshwright.train.measure import Unwatched, Watch
from meshwright.train.nonfinite import refuse_nonfinite
from meshwright.train.optimizer import set_rate
from meshwright.train.piped import pass_through
from meshwright.train.pulse import Pulse
from meshwright.train.scaler import LossScaler
from meshwright.train.sums import Seen, StepSums, read

_ATTEMPTS: Final = 3
"""Passes over one step in exact mode: the second is on the grid that the first asked for, and always fits."""

CLIP_EPSILON: Final = 1e-6
"""As in torch.nn.utils.clip_grad_norm_, so that a hand-written loop clips to the same numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """What a step does besides the arithmetic.

    Attributes:
        batch: the microbatch grid.
        schedule: learning rate by optimizer step.
        lr: peak rate of what no group gives a rate of its own.
        steps: steps of the whole training, where schedules end.
        max_grad_norm: clip at this global norm; None clips nothing.
        on_nonfinite: stop | skip.
        sync: last | every: which microbatches reduce gradients.
        exact: nothing of a step may depend on how many ranks share it.
    """

    batch: BatchPlan
    schedule: ScheduleSection
    lr: float
    steps: int
    max_grad_norm: float | None
    on_nonfinite: str
    sync: str
    exact: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did; all but `ids` are the same on every rank.

    Attributes:
        step: the step, from 1.
        loss: sum over all microbatches of all ranks / count over all, of each pair, added.
        lr: the recipe's rate, scaled and scheduled; groups may have their own.
        grad_norm: global 2-norm before clipping.
        count: label tokens (or samples) of the first pair.
        samples: samples of the step.
        skipped: why no update was made; empty if one was.
        ids: sample ids of this rank.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    count: float
    samples: int
    skipped: str
    ids: list[int]


@final
class Stepper:
    """Makes optimizer steps. A user's own loop takes one apart: `forward`, `backward`, `finish`."""

    def __init__(
        self,
        *,
        parallel: Parallel,
        mesh: Mesh,
        loss: LossFunction,
        optimizer: torch.optim.Optimizer,
        rules: StepRules,
        seeds: MicrobatchSeeds,
        scaler: LossScaler,
        pulse: Pulse,
    ) -> None:
        self.parallel, self.mesh, self.loss, self.optimizer = parallel, mesh, loss, optimizer
        self.rules, self.seeds, self.scaler, self.pulse = rules, seeds, scaler, pulse
        self.gradients = parallel.gradients
        self.warn: Callable[[str], None] = partial(warnings.warn, category=MeshwrightWarning)
        """Where rank 0 is told what the user should know; a run has its console for it."""
        self.watch: Watch = Unwatched()
        """Who is told where a step is; a run measures its memory so."""
        self._before: KeptBuffers | None = None
        self._buffers: MeanBuffers | None = None
        self._has_warned = self._has_told_of_lost = False
        self.idle: list[str] = []
        """Trainable parameters that got no gradient in the last step."""

    def step(self, stream: Iterator[Microbatch]) -> StepResult:
        """Take the microbatches of one step from the stream and make one update.

        Raises:
            NonFiniteError: a loss or the norm is NaN or infinite, and the rule is to stop.
        """
        mine = take_step(stream, self.rules.batch)
        for attempt in range(_ATTEMPTS):
            sums, weights = self._pass(mine)
            self._settle()
            why = self.gradients.retry()
            if not why:
                return self.finish(sums, mine, weights)
            if attempt == 0 and why != FIRST:
                self._tell(f"step {mine[0].step + 1} is computed again: {why}")
        raise RunError(
            f"step {mine[0].step + 1}",
            f"was computed {_ATTEMPTS} times, each time with other gradients: {why}.",
            "Exact mode needs a model that computes the same twice from the same seed.",
        )

    def _pass(self, mine: list[Microbatch]) -> tuple[StepSums, Weights]:
        """Forward and backward of this rank's microbatches."""
        if self.parallel.pipeline is not None:
            return pass_through(self, mine)
        sums, weights = self.begin(mine[0].step), counts_first(self, mine)
        for microbatch in mine:
            pairs = self.forward(microbatch, reduce=self.reduces(microbatch))
            weights = weights or counts_first(self, mine, pairs)
            self.backward(sums, microbatch, pairs, weights)
        return sums, weights

    def begin(self, step: int) -> StepSums:
        """Empty sums for a step, counted from 0."""
        self.parallel.settle()  # what was gathered for passes in between may be older than the weights
        self.gradients.begin()
        self.watch.begin(step)
        model, rules = self.parallel.bare, self.rules
        self._buffers = MeanBuffers(model) if rules.exact else None
        self._before = KeptBuffers(model) if rules.on_nonfinite == "skip" and not rules.exact else None
        return self.empty_sums()

    def _settle(self) -> None:
        """The passes are over: what they ran on besides the masters goes before the update needs room."""
        self.parallel.settle()
        self.watch.enter(UPDATE)

    def empty_sums(self) -> StepSums:
        """Sums of no microbatch yet."""
        return StepSums(self.rules.batch.total_microbatches, self.mesh.device, counts=self.tells)

    @property
    def tells(self) -> bool:
        """Does this rank tell what came of its microbatches? Of those that share them one does."""
        return self.mesh.tp_rank == 0 and (self.parallel.pipeline is None or self.parallel.pipeline.ends)

    def reduces(self, microbatch: Microbatch) -> bool:
        """Does the backward pass of this microbatch reduce gradients over the ranks?"""
        return microbatch.last or self.rules.sync == "every"

    def forward(self, microbatch: Microbatch, *, reduce: bool) -> list[Pair]:
        """Run the loss function on one microbatch; `reduce` says whether its backward reduces gradients."""
        batch = self.prepare(microbatch, reduce=reduce)
        before = None if len(microbatch.ids) else KeptBuffers(self.parallel.bare)
        pairs = self.pairs(batch)
        if before is not None:  # a stand-in's rows are another microbatch's
            before.put_back()
        return weighed(microbatch, pairs)

    def pairs(self, batch: Batch) -> list[Pair]:
        """What the loss function says of a batch."""
        with explained():
            pairs = pairs_of(self.parallel.entry(self.loss, batch), batch, self.warn_once)
        if any(isinstance(pair.total, DTensor) for pair in pairs):
            raise used_outside()
        return pairs

    def _tell(self, text: str) -> None:
        if self.mesh.rank == 0:
            self.warn(text)

    def _tell_of_lost(self, step: int, lost: dict[str, int]) -> None:
        """Say once that exact mode treats the smallest gradients otherwise than fast mode does."""
        if lost and not self._has_told_of_lost:
            self._has_told_of_lost = True
            name, n = max(lost.items(), key=lambda item: item[1])
            more = f" (and {len(lost) - 1} more parameters)" if len(lost) > 1 else ""
            self._tell(
                "exact mode rounded gradients to zero that fast mode would have kept: in step "
                f"{step}, up to {n} elements a microbatch of {name}{more}, each more than 2**{RESOLUTION} below the "
                "largest; said once"
            )

    def warn_once(self, text: str) -> None:
        """Tell rank 0's user something that one run says once."""
        if not self._has_warned and self.mesh.rank == 0:
            self.warn(text)
        self._has_warned = True

    def prepare(self, microbatch: Microbatch, *, reduce: bool) -> Batch:
        """Seed the forward pass of one microbatch, and put its rows on the device."""
        self.pulse.beat(microbatch.step + 1, "forward", microbatch.index)
        self.watch.enter(FORWARD)
        self.seeds.at(microbatch.step, microbatch.index)
        self.parallel.announce(reduce, microbatch.last)
        return to_device(microbatch.batch, self.mesh.device)

    def backward(self, sums: StepSums, microbatch: Microbatch, pairs: list[Pair], weights: Weights) -> None:
        """Add one microbatch to the gradients and to the sums."""
        self.pulse.beat(microbatch.step + 1, "backward", microbatch.index)
        self.watch.enter(BACKWARD)
        sums.add(microbatch, pairs)
        objective = self.objective(pairs, weights)
        self.gradients.at(microbatch.index)
        torch.autograd.backward(self.parallel.before_backward(objective))
        if self._buffers is not None:
            self._buffers.take(microbatch.index)

    def objective(self, pairs: list[Pair], weights: Weights) -> torch.Tensor:
        """What the backward pass of a microbatch starts from."""
        if len(pairs) != len(weights):
            rule = f"returned {len(pairs)} pairs, and its `counts` has {len(weights)} numbers."
            if self.parallel.pipeline is not None and weights == [None]:
                rule = f"returned {len(pairs)} pairs, and a pipeline must know their counts before the first backward."
            raise SpecError(
                "the loss function", rule, "One count for each pair: give it `counts` (docs/same-training.md)."
            )
        terms = [
            pair.total if weight is None else pair.total * weight for pair, weight in zip(pairs, weights, strict=True)
        ]
        objective = sum(terms[1:], terms[0])
        if not objective.requires_grad:
            raise SpecError(
                "the loss function",
                "returned a sum that does not depend on the model's parameters.",
                "Return it undetached.",
            )
        return objective * self.scaler.scale if self.scaler.enabled else objective

    def finish(self, sums: StepSums, mine: list[Microbatch], weights: Weights, *, replay: bool = True) -> StepResult:
        """Combine the ranks' sums, decide together, clip, and update.

        Args:
            sums: of this rank.
            mine: this rank's microbatches.
            weights: what the pairs were weighted by.
            replay: find a bad gradient by running the microbatches again; False if the loss function did not make it.

        Raises:
            NonFiniteError: a loss or the norm is NaN or infinite, and the rule is to stop.
        """
        step = mine[0].step
        self.pulse.beat(step + 1, "optimizer")
        self._settle()
        seen = read(sums, self.gradients, weights, self.mesh.layout.world_size)
        self.idle = seen.gradients.idle
        count = divisor(seen.counts[0]) if weights == [None] else 1.0  # several pairs were divided before backward
        scale = self.gradients.factor / count / self.scaler.scale
        norm = seen.gradients.norm * scale
        loss = math.fsum(total / divisor(n) for total, n in zip(seen.totals, seen.counts, strict=True))
        skipped = self._verdict(mine, seen, loss, norm, weights if replay else None)
        multiplier = lr_multiplier(self.rules.schedule, self.rules.steps, step)
        set_rate(self.optimizer, multiplier)
        if not skipped:
            require_counts(seen.counts, seen.weights)
            if self._buffers is not None:
                total = -(-seen.samples // self.rules.batch.microbatch_size)  # fewer in the last step of an epoch
                self._buffers.settle(total, self.mesh.layout.dp_degree, self.mesh.groups.dp)
            self._tell_of_lost(step + 1, seen.gradients.lost)
            self._update(step, scale * self._clipping(norm))
        elif self._before is not None:
            self._before.put_back()
        self.gradients.drop()
        return StepResult(
            step + 1, loss, self.rules.lr * multiplier, norm, seen.counts[0], seen.samples, skipped, sums.ids
        )

    def _verdict(self, mine: list[Microbatch], seen: Seen, loss: float, norm: float, weights: Weights | None) -> str:
        """Empty if the update may be made; else why it is skipped. All ranks see the same numbers."""
        is_sound = math.isfinite(loss) and not any(seen.flags)
        if is_sound and math.isfinite(norm):
            self.scaler.succeeded()
            return ""
        if is_sound and self.scaler.enabled:
            self.scaler.overflowed()
            return f"fp16 overflow, loss scale now {self.scaler.scale:g}"
        return refuse_nonfinite(self, mine, seen, loss, norm, weights)

    def _clipping(self, norm: float) -> float:
        limit = self.rules.max_grad_norm
        return 1.0 if limit is None else min(1.0, limit / (norm + CLIP_EPSILON))

    def _update(self, step: int, factor: float) -> None:
        self.gradients.scale(factor)
        self.seeds.at(step, -1)  # an optimizer that adds noise must add the same on every rank
        self.optimizer.step()
        if self.parallel.spreading is not None:
            self.parallel.spreading.refresh()


def weighed(microbatch: Microbatch, pairs: list[Pair]) -> list[Pair]:
    """The pairs of a microbatch; those of a stand-in count for nothing."""
    return pairs if len(microbatch.ids) else [Pair(pair.total * 0.0, 0.0) for pair in pairs]


def take_step(stream: Iterator[Microbatch], batch: BatchPlan) -> list[Microbatch]:
    """This rank's microbatches of the next step; the last one says that it is."""
    mine: list[Microbatch] = []
    for microbatch in islice(stream, batch.num_microbatches):
        mine.append(microbatch)
        if microbatch.last:
            break
    assert mine and mine[-1].last, "the stream ended inside a step"
    return mine
