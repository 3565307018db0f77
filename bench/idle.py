"""How long the ranks of a pipeline wait, schedule by schedule, beside the formula. `make idle` runs it.

A rank's work is a sleep, of equal length in a layer's forward pass, in its backward pass of inputs and in that of
weights, so that ranks wait for each other and never for a core. Busy is the time within the passes of a rank's stages;
the idle share is 1 - busy / (ranks x wall), the wall from the first rank's start of a step to the last one's end, and
the result is the median over some steps. The formula is that of spec/pipeline.py: nothing is sent, and no rank has
anything else to do.

What is measured lies above it by what a message and a schedule's own Python take of a pass. It is no race: another
program that holds all cores for as long as a pass lengthens waits, and --sleep-ms makes passes longer than it does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function

from meshwright.spec.layout import chunks_of
from meshwright.spec.load import from_table
from meshwright.spec.pipeline import idle_formula, idle_share
from meshwright.spec.sections import PP_SCHEDULES
from meshwright.train.launch import launch
from meshwright.train.trainer import Trainer
from meshwright.train.world import join_world

LAYERS: Final = 8
PASSES: Final = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


@final
class _Pass(Function):
    """Hands a tensor on, and sleeps when its gradient passes; in forward too, if it is an activation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sleep_s: float, in_forward: bool) -> torch.Tensor:
        ctx.sleep_s = sleep_s
        time.sleep(sleep_s * in_forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.sleep_s)
        return gradient, None, None


@final
class Sleeper(nn.Module):
    """x + weight, three sleeps: forward, backward of x, backward of the weight."""

    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self.weight, self.sleep_s = nn.Parameter(torch.zeros(1)), sleep_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Pass.apply(x, self.sleep_s, True) + _Pass.apply(self.weight, self.sleep_s, False)


@final
class Start(nn.Module):
    """x + weight: makes the first layer's backward pass of inputs as long as the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


@final
class Chain(nn.Module):
    """Numbers (b, 1) -> (b, 1)."""

    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self.start = Start()
        self.blocks = nn.ModuleList(Sleeper(sleep_s) for _ in range(LAYERS))

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.start(x)
        return out

    def through(self, x: torch.Tensor, blocks: Iterable[nn.Module], seq_len: int) -> torch.Tensor:
        for block in blocks:
            x = block(x)
        return x

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(self.begin(x), self.blocks, x.shape[1])


@final
class Numbers:
    """Samples of one number."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.ones(1)


def total(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).sum(), len(batch)


@dataclass(slots=True)
class Clock:
    """One rank's step: when it was in its schedule, and how long in its passes."""

    began_s: float = 0.0
    ended_s: float = 0.0
    busy_s: float = 0.0
    depth: int = field(default=0, repr=False)

    def times(self, one_pass: Callable[..., Any]) -> Callable[..., Any]:
        """The same pass, timed; one that calls another counts once."""

        @wraps(one_pass)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began, self.depth = time.monotonic(), self.depth + 1
            try:
                return one_pass(*args, **kwargs)
            finally:
                self.depth -= 1
                self.busy_s += 0.0 if self.depth else time.monotonic() - began

        return timed

    def runs(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """The same schedule, timed."""

        @wraps(schedule)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.began_s, self.busy_s = time.monotonic(), 0.0
            result = schedule(*args, **kwargs)
            self.ended_s = time.monotonic()
            return result

        return timed


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule on so many ranks: idle shares, measured and by the formula."""

    schedule: str
    pp: int
    measured: float
    expected: float
    formula: str


def measure(schedule: str, pp: int, microbatches: int, sleep_s: float, steps: int) -> Row:
    """Run some steps; the first makes stages and connections, and is not counted."""
    table = {
        "model": {"build": "idle:Chain", "sleep_s": sleep_s},
        "data": {"build": "idle:Numbers", "workers": 0},
        "loss": {"build": "idle:total"},
        "batch": {"global_batch_size": microbatches, "microbatch_size": 1},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "layout": {"pp": pp, "pp_schedule": schedule},
        "train": {"steps": steps + 1},
        "record": {"memory": False},
    }
    chunks = chunks_of(from_table(table).layout)
    shares = launch(partial(_idle_shares, table, steps), nproc=pp)
    assert shares is not None
    expected = idle_share(schedule, pp, chunks, microbatches)
    return Row(schedule, pp, statistics.median(shares), expected, idle_formula(schedule, pp, chunks, microbatches))


def _idle_shares(table: dict[str, Any], steps: int) -> list[float]:
    """Of each step but the first, on every rank the same."""
    with join_world(device="cpu") as world:
        trainer, clock = Trainer(from_table(table), world), Clock()
        stream = trainer.stream(0, steps + 1)
        trainer.stepper.step(stream)
        _put_clock(trainer, clock)
        return [_idle_share(trainer, stream, clock) for _ in range(steps)]


def _put_clock(trainer: Trainer, clock: Clock) -> None:
    pipeline = trainer.stepper.parallel.pipeline
    assert pipeline is not None
    pipeline._schedule.step = clock.runs(pipeline._schedule.step)
    for stage in pipeline._stages:
        for name in PASSES:
            setattr(stage, name, clock.times(getattr(stage, name)))


def _idle_share(trainer: Trainer, stream: Iterator[Any], clock: Clock) -> float:
    trainer.stepper.step(stream)
    clocks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(clocks, (clock.began_s, clock.ended_s, clock.busy_s))
    wall = max(ended for _, ended, _ in clocks) - min(began for began, _, _ in clocks)
    return float(1 - sum(busy for _, _, busy in clocks) / (len(clocks) * wall))


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The report, for people."""
    yield f"{'schedule':<26}{'ranks':>5}{'measured':>10}{'formula':>9}{'apart':>8}   how it comes about"
    for row in rows:
        apart = row.measured - row.expected
        yield f"{row.schedule:<26}{row.pp:>5}{row.measured:>10.3f}{row.expected:>9.3f}{apart:>+8.3f}   {row.formula}"


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    rows = []
    for pp in options.pp or (2, 4):
        for schedule in options.schedule or PP_SCHEDULES:
            rows.append(measure(schedule, pp, options.microbatches, options.sleep_ms / 1e3, options.steps))
            print(f"{schedule} on {pp}: {rows[-1].measured:.3f}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps([{name: getattr(row, name) for name in Row.__slots__} for row in rows]))
    else:
        print("\n".join(lines(rows)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="the idle share of pipelines beside the formula")
    parser.add_argument("--pp", type=int, action="append", help="ranks; may be given again (default: 2 and 4)")
    parser.add_argument("--schedule", action="append", choices=PP_SCHEDULES, help="may be given again (default: all)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument("--sleep-ms", type=float, default=80.0, help="of a layer's pass (default: 80)")
    parser.add_argument("--steps", type=int, default=3, help="that count (default: 3)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
