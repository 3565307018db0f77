"""What is predicted of a run before it begins, by a part of the program that this one does not know.

A prediction needs a trace of the run's model, loss and data. Rank 0 has a child process make it: what a user's loss
function does besides (counting, printing, drawing random numbers) then happens to a copy, and training does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import torch.nn as nn

from meshwright.spec.batch import plan_batch
from meshwright.spec.layout import Layout
from meshwright.spec.model_spec import ModelSpec
from meshwright.spec.recipe import Recipe
from meshwright.train.dataset import DatasetSource
from meshwright.train.forked import Forked
from meshwright.train.loader import Source
from meshwright.train.loss import LossFunction

Bytes = Mapping[str, Mapping[str, int]]
"""Bytes by moment and term."""

Forecast = Callable[[Recipe, Layout, str, ModelSpec, int], Bytes]
"""forecast(recipe, layout, device type, model, pp rank): what that rank should measure."""

LIMIT_S: Final = 20.0
"""How long a run's end waits for a prediction that is not there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foresight:
    """What the command line knows of a run, and hands over.

    Attributes:
        lines: to be said before the run's own.
        plan: the whole plan, for plan.json; None where nothing was planned.
        forecast: turns a trace into a prediction; None predicts nothing.
    """

    lines: tuple[str, ...] = ()
    plan: Mapping[str, Any] | None = None
    forecast: Forecast | None = None


UNKNOWN: Final = Foresight()
"""Nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A run's parts before they are spread: what a trace needs.

    Attributes:
        recipe: of the run.
        layout: of the run.
        device: cpu | cuda.
        model: bare, with or without memory.
        loss: its loss function.
        source: its data.
    """

    recipe: Recipe
    layout: Layout
    device: str
    model: nn.Module
    loss: LossFunction
    source: Source

    def trace(self) -> ModelSpec:
        """Describe the model for the cost room.

        Raises:
            SpecError: it cannot be traced.
        """
        # Half a second of imports that only the child needs.
        from meshwright.models.trace import trace_module
        from meshwright.parallel.recompute import selective_contexts
        from meshwright.train.trace_recipe import samples_of, seq_len_of, tokens_of

        recipe, source = self.recipe, self.source
        is_own = isinstance(source, DatasetSource)
        # Near the size that runs, as peaks are not quite linear; from 2 on, see models/trace.py.
        size = max(2, plan_batch(recipe.batch, self.layout.dp_degree).microbatch_size)
        if isinstance(source, DatasetSource):
            alone = DatasetSource(source.dataset, source.seed, workers=0, collate=source.collate.inner)
            batch_of: Callable[[int], Any] = partial(samples_of, alone)
        else:
            batch_of = partial(tokens_of, recipe.data.seq_len)
        return trace_module(
            self.model,
            self.loss,
            batch_of,
            compute=recipe.precision.compute,
            kernels="cpu" if self.device == "cpu" else "cuda",
            seq_len=seq_len_of(batch_of) if is_own else recipe.data.seq_len,
            name=recipe.model.name or type(self.model).__name__,
            selective=partial(selective_contexts, "block"),
            microbatches=(size, size + 1),
        )


@final
class Seer:
    """Has a run's memory predicted in a child process, where somebody can.

    Args:
        forecast: makes a prediction of a trace; None where nothing is to be predicted.
    """

    def __init__(self, forecast: Forecast | None) -> None:
        self._forecast = forecast
        self._work: Forked | None = None

    def see(self, blueprint: Blueprint) -> None:
        """Begin to predict."""
        forecast = self._forecast
        if forecast is not None:
            one = blueprint
            self._work = Forked(lambda: forecast(one.recipe, one.layout, one.device, one.trace(), 0))  # rank 0 measures

    def result(self, limit_s: float) -> tuple[Bytes | None, str]:
        """The prediction; or None, and why there is none (yet).

        Args:
            limit_s: how long to wait for it.
        """
        if self._work is None:
            return None, ""
        found, why = self._work.result(limit_s)
        return found, f"not predicted: {why}" if why else ""

    def close(self) -> None:
        """Stop."""
        if self._work is not None:
            self._work.close()
