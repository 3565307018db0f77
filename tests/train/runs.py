"""Whole runs on ranks, in a run folder: what they print, what they leave on disk, and how two of them compare."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from meshwright.parallel.entry import Spreading
from meshwright.parallel.homes import homes_of
from meshwright.parallel.leaves import Leaf
from meshwright.parallel.mesh import Mesh
from meshwright.spec.layout import Layout
from meshwright.spec.load import from_table
from meshwright.train.agree import Agreement
from meshwright.train.checkpoint import save
from meshwright.train.optimizer import NAMES
from meshwright.train.run import begin_run, run_recipe
from meshwright.train.state import Piece, State
from train.parity import recipe_table

TIMES = ("step_time_s", "tokens_per_s")
SUMMARY_TIMES = ("seconds",)


@dataclass(frozen=True)
class Told:
    """What one rank returned and printed."""

    summary: dict[str, Any]
    out: str
    err: str


def small_table(optimizer: str = "adamw", compute: str = "fp64", steps: int = 12, **changes: Any) -> dict[str, Any]:
    """Ragged rows, dropout, clipping, 8 steps and one row an epoch: 12 steps cross into the next."""
    table = recipe_table("llama", compute, optimizer, steps=steps, schedule={"warmup_steps": 2})
    table["train"]["record_samples"] = True
    table["model"] = table["model"] | {"n_layers": 1}
    for section, values in changes.items():
        table[section] = {k: v for k, v in (table.get(section, {}) | values).items() if v is not None}
    return table


def run_in(world: Any, table: Mapping[str, Any], folder: str, resume: bool = False) -> Told:
    """A whole run on this rank."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        summary = run_recipe(from_table(table), Path(folder), resume=resume, world=world)
    return Told(summary, out.getvalue(), err.getvalue())


def loaded_in(
    world: Any, table: Mapping[str, Any], folder: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and optimizer state of this rank right after resuming."""
    with contextlib.closing(
        begin_run(from_table(table), Path(folder), resume=True, world=world, progress=False)
    ) as run:
        state = run.trainer.state
        return gathered(state.weights()), gathered(state.moments())


def gathered(pieces: list[Piece]) -> dict[str, torch.Tensor]:
    """Whole tensors by name, under tp and pp on rank 0 alone; collective where they are cut."""
    whole = {piece.name: piece.whole() for piece in pieces}
    return {name: tensor.clone() for name, tensor in whole.items() if tensor is not None}


def changed(table: Mapping[str, Any], **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the table with other values."""
    return dict(table) | {name: dict(table.get(name, {})) | dict(values) for name, values in sections.items()}


def copied(folder: Path, name: str) -> Path:
    """A copy of a run folder beside it."""
    target = folder.with_name(name)
    shutil.copytree(folder, target)
    return target


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of a record, without what is only time."""
    lines = (folder / name).read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def summary_of(folder: Path) -> dict[str, Any]:
    """summary.json, without what is only time."""
    found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {k: v for k, v in found.items() if k not in SUMMARY_TIMES}


def steps_in(folder: Path) -> list[int]:
    """Steps of what has a checkpoint's name, ascending."""
    home = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    return sorted(int(path.name[5:]) for path in home.iterdir() if re.fullmatch(r"step-\d{8,}", path.name))


def tree_hash(root: Path) -> str:
    """A hash of all names, types, contents and times of modification below a folder."""
    total = hashlib.sha256()
    for path in sorted([root, *root.rglob("*")]):
        facts = path.lstat()
        total.update(f"{path}\0{facts.st_mode}\0{facts.st_mtime_ns}\0".encode())
        if path.is_file():
            total.update(path.read_bytes())
        elif path.is_symlink():
            total.update(os.readlink(path).encode())
    return total.hexdigest()


TINY_RECIPE: dict[str, Any] = {
    "model": {"name": "llama", "n_layers": 1, "d_model": 16, "n_heads": 2},
    "data": {"seq_len": 8},
    "batch": {"global_batch_size": 4, "microbatch_size": 2},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "train": {"steps": 100},
}


def tiny_state(value: float = 1.0) -> State:
    """A module of a few weights, all of one value, with an optimizer that has state."""
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, -value)
    named = list(model.named_parameters())
    optimizer = torch.optim.SGD([{"params": [p for _, p in named], NAMES: [n for n, _ in named]}], lr=0.0, momentum=0.9)
    for _, parameter in named:
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return state_of(model, optimizer, [Leaf(name, parameter, parameter) for name, parameter in named])


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, leaves: list[Leaf]) -> State:
    """Of a module on one process, which nothing has cut."""
    alone = Mesh(Layout(), 0, torch.device("cpu"))
    return State(model, optimizer, leaves, Spreading(homes=homes_of(model, alone)))


def tiny_facts(recipe: Mapping[str, Any] = TINY_RECIPE) -> dict[str, Any]:
    """What a manifest holds besides, as a run has it."""
    return {
        "layout": "single",
        "world_size": 1,
        "tokens": 0,
        "samples": 0,
        "loss_scale": [1.0, 0],
        "data": {"num_samples": 20, "about": ""},
        "recipe": dict(recipe),
    }


def save_tiny(home: Path, step: int, keep_last: int = 9, recipe: Mapping[str, Any] = TINY_RECIPE) -> Path:
    """A checkpoint whose weights are all its step."""
    return save(home, step, tiny_state(float(step)), tiny_facts(recipe), keep_last, Agreement(0, 1))[0]
