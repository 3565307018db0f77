"""What each rank sends in a step of `meshwright train`: every collective counted.

    python bench/count_bytes.py RECIPE OUT --layouts ddp2,zero3x2     writes OUT/bytes.json, by layout and mode

Each rank writes what it has sent so far after each optimizer step. What lies between the last two of these lines is one
step, without start, saving and what exact mode computes again in the first.

Bytes are payload by the ring formula, what a rank of n sends in a ring of n:

    all-reduce                    2 (n - 1) / n x the tensor
    reduce-scatter, all-gather      (n - 1) / n x the whole tensor
    broadcast                       (n - 1) / n x the tensor, on average

It is a count of what was asked for. gloo's reduce-scatter is an all-reduce of which it keeps a part, and sends twice
that; NCCL's is not. A dispatch mode sees the calls where they enter torch's dispatcher, so those of DDP's C++ and of
FSDP2 too.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist
from sides import MODES, layouts_of, train_arguments
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.cli.main import main
from meshwright.spec.layout import Layout

STEPS: Final = 3
"""The first is computed twice in exact mode, the second begins behind it, the third is counted."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those of nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors(inner)


def nbytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(value))


SENT: Final[Mapping[str, Callable[[tuple[Any, ...], int], float]]] = {
    # The first argument is what is written, the second what is read: lists of tensors, or one.
    "allreduce_": lambda args, n: 2 * (n - 1) / n * nbytes(args[0]),
    "_reduce_scatter_base_": lambda args, n: (n - 1) / n * nbytes(args[1]),
    "_allgather_base_": lambda args, n: (n - 1) / n * nbytes(args[0]),
    "allgather_": lambda args, n: (n - 1) / n * nbytes(args[0]),
    "broadcast_": lambda args, n: (n - 1) / n * nbytes(args[0]),
    "barrier": lambda args, n: 0.0,
}


@final
class Sent(TorchDispatchMode):
    """Adds up what this rank sends; `uncounted` has the operations that no formula is known of."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: dict[str, float] = {}
        self.uncounted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor makes plain tensors' operations of it, which come here again
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            self._count(func.__name__.partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in SENT:
            self.uncounted[name] += 1
            return
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        self.calls[name] += 1
        self.bytes[name] = self.bytes.get(name, 0.0) + SENT[name](args, group.size())


def write(sent: Sent, home: Path) -> None:
    """Add a line to this rank's file."""
    line = {"calls": sent.calls, "bytes": sent.bytes, "uncounted": sent.uncounted}
    with (home / f"rank{os.environ.get('RANK', 0)}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def count(recipe: Path, home: Path, layout: Layout, mode: str) -> dict[str, float]:
    """Bytes of one step by operation, of the rank that sends most.

    The ranks are forked from here, and the mode with them.
    """
    arguments = train_arguments(recipe, home / "run", layout, STEPS, [f"train.reduction={mode}"])
    home.mkdir(parents=True)
    sent = Sent()
    handle = register_optimizer_step_post_hook(lambda *_: write(sent, home))
    try:
        with sent:
            if main(arguments):
                raise RuntimeError(f"meshwright {' '.join(arguments)} failed.")
    finally:
        handle.remove()
    return max((last_step(log) for log in home.glob("rank*.jsonl")), key=lambda found: sum(found.values()))


def last_step(log: Path) -> dict[str, float]:
    before, after = (json.loads(line) for line in log.read_text().splitlines()[-2:])
    if before["uncounted"] != after["uncounted"]:
        raise RuntimeError(f"no formula for the bytes of {after['uncounted']}.")
    return {name: sent - before["bytes"].get(name, 0.0) for name, sent in after["bytes"].items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="bytes that each rank sends in a step")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layouts", type=layouts_of, default="ddp2,zero3x2")
    options = parser.parse_args()
    found = {
        layout.word: {m: count(options.recipe, options.out / f"{layout.word}-{m}", layout, m) for m in MODES}
        for layout in options.layouts
    }
    (options.out / "bytes.json").write_text(json.dumps(found, indent=1))
