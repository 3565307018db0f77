"""A step through a pipeline: the schedule consumes all microbatches of this rank at once.

A schedule is made for a number of microbatches of one shape. A step that has fewer (the last of an epoch) is filled up
with stand-ins, and a microbatch with fewer rows with copies of one: both are run and count for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch import nn

from meshwright.errors import SpecError
from meshwright.parallel.pipeline import Pipeline, Visits
from meshwright.spec.moments import BACKWARD, FORWARD
from meshwright.train.counts import Weights, counts_first
from meshwright.train.loader import Batch, Microbatch, to_device
from meshwright.train.loss import LossFunction, Pair, pairs_of
from meshwright.train.sums import StepSums

if TYPE_CHECKING:
    from meshwright.train.step import Stepper


def pass_through(stepper: Stepper, mine: list[Microbatch]) -> tuple[StepSums, Weights]:
    """Forward and backward of a step's microbatches.

    Args:
        stepper: the step's owner.
        mine: this data-parallel rank's microbatches.
    """
    pipeline, sums = _pipeline(stepper), stepper.begin(mine[0].step)
    weights = counts_first(stepper, mine)
    run = _Pass(stepper, _filled(stepper, mine), sums, weights)
    stepper.parallel.announce(True, True)
    visits = Visits(forward=run.forward, backward=run.backward, harvest=run.harvest, objective=run.objective)
    pipeline.run(run.inputs(), visits)
    if not pipeline.ends:
        for microbatch in mine:
            sums.add(microbatch, [Pair(torch.zeros((), device=stepper.mesh.device), 0.0)] * len(weights))
    return sums, weights


def first_bad_of_pipeline(stepper: Stepper, mine: list[Microbatch]) -> float:
    """Run a step again; the first microbatch that leaves a bad gradient on this rank, infinity if none does."""
    stepper.gradients.drop()
    run = _Pass(stepper, _filled(stepper, mine), stepper.empty_sums(), counts_first(stepper, mine))
    found = [math.inf]

    def harvest(stage: int, place: int) -> None:
        run.harvest(stage, place)
        if not stepper.gradients.finite():
            found[0] = min(found[0], float(run.microbatches[place].index))

    stepper.parallel.announce(True, True)
    visits = Visits(forward=run.forward, backward=run.backward, harvest=harvest, objective=run.objective)
    _pipeline(stepper).run(run.inputs(), visits)
    return found[0]


def evaluated(stepper: Stepper, stream: Iterator[Microbatch]) -> Iterator[tuple[Microbatch, list[Pair]]]:
    """Each microbatch with what the loss function says of it; zeros where another rank has the last stage."""
    pipeline, device = _pipeline(stepper), stepper.mesh.device
    counts = getattr(stepper.loss, "counts", None)
    for microbatch in stream:
        batch = to_device(microbatch.batch, device)
        number = len(counts(batch)) if callable(counts) else 1
        pairs = [Pair(torch.zeros((), device=device), 0.0)] * number

        def done(place: int, output: torch.Tensor, batch: Batch = batch, pairs: list[Pair] = pairs) -> None:
            pairs[:] = pairs_of(stepper.loss(_Gives(output), batch), batch, stepper.warn_once)

        pipeline.evaluate([input_of(stepper.loss, batch)], lambda place, is_root: None, done)
        yield microbatch, pairs


def _pipeline(stepper: Stepper) -> Pipeline:
    pipeline = stepper.parallel.pipeline
    assert pipeline is not None, "there is more than one stage"
    return pipeline


def _filled(stepper: Stepper, mine: list[Microbatch]) -> list[Microbatch]:
    """As many microbatches as the schedule is made for."""
    lacking = stepper.rules.batch.num_microbatches - len(mine)
    return [*mine, *(replace(mine[0], ids=mine[0].ids[:0]) for _ in range(lacking))]


@final
class _Pass:
    """What happens to each microbatch of a step, by its place in it."""

    def __init__(self, stepper: Stepper, microbatches: list[Microbatch], sums: StepSums, weights: Weights) -> None:
        self._stepper, self.microbatches, self._sums, self._weights = stepper, microbatches, sums, weights
        self._batches = [to_device(microbatch.batch, stepper.mesh.device) for microbatch in microbatches]
        self._rows = [0] * len(microbatches)

    def inputs(self) -> list[torch.Tensor]:
        """Of the first stage, with as many rows each as a whole microbatch has.

        Raises:
            SpecError: they are not of one shape, which stages agree on before they begin.
        """
        found = []
        for place, batch in enumerate(self._batches):
            self._seed(place)  # a loss function may draw before it calls the model
            found.append(input_of(self._stepper.loss, batch))
            self._rows[place] = len(found[-1])
        most = max(self._rows)
        shapes = sorted({tuple(one.shape[1:]) for one in found})
        if len(shapes) > 1:
            rule = f"has microbatches with rows of shapes {shapes[0]} and {shapes[-1]}; those of a pipeline are of one."
            raise SpecError(f"step {self.microbatches[0].step + 1}", rule, "Nearest: rows padded to one length.")
        most = max(most, self._stepper.rules.batch.microbatch_size)
        return [_filled_up(one, most) for one in found]

    def _seed(self, place: int) -> None:
        microbatch = self.microbatches[place]
        self._stepper.seeds.at(microbatch.step, microbatch.index)

    def forward(self, place: int, is_root: bool) -> None:
        """Seed the forward pass of a microbatch."""
        microbatch, stepper = self.microbatches[place], self._stepper
        stepper.pulse.beat(microbatch.step + 1, "forward", microbatch.index)
        stepper.watch.enter(FORWARD)
        self._seed(place)
        if is_root:
            stepper.seeds.enter("")

    def backward(self, place: int) -> None:
        """Say whose gradients come."""
        microbatch, stepper = self.microbatches[place], self._stepper
        stepper.pulse.beat(microbatch.step + 1, "backward", microbatch.index)
        stepper.watch.enter(BACKWARD)
        stepper.gradients.at(microbatch.index)

    def harvest(self, stage: int, place: int) -> None:
        """Take the gradients that a stage has got."""
        gradients: Any = self._stepper.gradients
        gradients.harvest.take(stage)

    def objective(self, place: int, output: torch.Tensor) -> torch.Tensor:
        """What backward starts from, once the last stage is through."""
        microbatch, batch, stepper = self.microbatches[place], self._batches[place], self._stepper
        rows = self._rows[place]
        after = stepper.seeds.state()
        self._seed(place)  # what the loss draws before it calls the model; what it draws after, follows the last block
        gives = _Gives(output if rows == len(output) else output[:rows], lambda: stepper.seeds.restore(after))
        pairs = pairs_of(stepper.loss(gives, batch), batch, stepper.warn_once)
        if gives.calls != 1:
            raise SpecError("the loss function", f"calls the model {gives.calls} times; in a pipeline it must once.")
        if not len(microbatch.ids):
            pairs = [Pair(pair.total * 0.0, 0.0) for pair in pairs]
        self._sums.add(microbatch, pairs)
        objective = stepper.objective(pairs, self._weights)
        return objective.clone() if objective._is_view() else objective  # torch detaches it in place


@final
class _Gives(nn.Module):
    """Stands for the model in a loss function on the last stage: gives what the pipeline has computed."""

    def __init__(self, output: torch.Tensor, called: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._output, self._called, self.calls = output, called, 0

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Give it, whatever is asked."""
        self.calls += 1
        self._called()
        return self._output


class _Asked(Exception):
    """What a loss function called the model with."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args_given, self.kwargs_given = args, kwargs


def _ask(*args: Any, **kwargs: Any) -> NoReturn:
    raise _Asked(args, kwargs)


def input_of(loss: LossFunction, batch: Batch) -> torch.Tensor:
    """What a loss function calls the model with.

    Raises:
        SpecError: it does not call it with one tensor.
    """
    model: Any = partial(_ask)
    try:
        loss(model, batch)
    except _Asked as asked:
        given = [*asked.args_given, *asked.kwargs_given.values()]
        if len(given) == 1 and isinstance(given[0], torch.Tensor):
            return given[0]
        what = f"calls the model with {len(given)} arguments"
    else:
        what = "does not call the model"
    raise SpecError("the loss function", f"{what}; in a pipeline it must call it once, with one tensor.")


def _filled_up(rows: torch.Tensor, number: int) -> torch.Tensor:
    """As many rows as are asked for; those put behind are the first one's, and nobody looks at what they give."""
    lacking = number - len(rows)
    return rows if not lacking else torch.cat([rows, rows[:1].expand(lacking, *rows.shape[1:])])
