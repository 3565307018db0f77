"""The commands that are compared: each trains a recipe in one layout and writes OUT/metrics.jsonl, a line a step."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from meshwright.spec.layout import Layout, parse_layout

HERE: Final = Path(__file__).parent
MODES: Final = ("fast", "exact")

Command = Callable[[Path, Path, Layout, int], list[str]]


def meshwright(recipe: Path, out: Path, layout: Layout, steps: int) -> list[str]:
    """`meshwright train`, recording as always."""
    return [sys.executable, "-m", "meshwright", *train_arguments(recipe, out, layout, steps)]


def hand(recipe: Path, out: Path, layout: Layout, steps: int) -> list[str]:
    """The hand-written loop under torchrun; one process is started as such."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(layout.world_size)]
    return [sys.executable, *(torchrun if layout.world_size > 1 else []), *_loop(recipe, out, layout, steps)]


def hand_forked(recipe: Path, out: Path, layout: Layout, steps: int) -> list[str]:
    """The hand-written loop with ranks that are forked after one import of torch."""
    return [sys.executable, *_loop(recipe, out, layout, steps), "--fork"]


def train_arguments(recipe: Path, out: Path, layout: Layout, steps: int, settings: Sequence[str] = ()) -> list[str]:
    """What `meshwright` is called with."""
    names = ("dp_replicate", "dp_shard", "zero_stage", "tp", "pp")
    degrees = [f"layout.{name}={getattr(layout, name)}" for name in names]
    where = ["--nproc", str(layout.world_size), "--run-dir", str(out)]
    return ["train", str(recipe), *where, "--set", f"train.steps={steps}", *degrees, *settings]


def layouts_of(words: str) -> list[Layout]:
    """Of layout words with commas between."""
    return [parse_layout(word) for word in words.split(",")]


def tokens_per_step(recipe: Path) -> int:
    """Tokens of the global batch."""
    described = tomllib.loads(recipe.read_text())
    return int(described["batch"]["global_batch_size"]) * int(described["data"]["seq_len"])


def _loop(recipe: Path, out: Path, layout: Layout, steps: int) -> list[str]:
    return [str(HERE / "hand_loop.py"), str(recipe), str(out), "--steps", str(steps), "--layout", layout.word]
