"""Saving and loading the state of a training. Rank 0 writes; every rank loads.

Contract 8: written beside, published by one rename, so that a kill at any moment leaves the last good one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from meshwright.errors import CheckpointError
from meshwright.models.digest import state_items, weights_sha256
from meshwright.spec.nearest import first_of
from meshwright.train import stored
from meshwright.train.optimizer import NAMES, load_named_state, named_state
from meshwright.train.step import local
from meshwright.train.stored import MANIFEST, MODEL, OPTIMIZER, SEAL, Stored


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint holds besides its manifest.

    Attributes:
        model: bare module.
        optimizer: its optimizer.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers, whole, on the host, a tied tensor once."""
        return _apart({name: local(t.detach()).cpu().contiguous() for name, t in state_items(self.model)})

    def moments(self) -> dict[str, torch.Tensor]:
        """Optimizer state, whole, on the host."""
        return {name: local(t.detach()).cpu().contiguous() for name, t in named_state(self.optimizer).items()}


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of those that share memory with an earlier one without being the same: a file holds each by itself."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        if address in seen:
            tensors[name] = tensor.clone()
        seen.add(address)
    return tensors


def save(home: Path, step: int, state: State, facts: Mapping[str, Any], keep_last: int) -> Path:
    """Save and publish a checkpoint. Rank 0 calls it, through `Agreement`, so that all ranks learn how it went.

    Args:
        home: the `checkpoints` folder.
        step: optimizer steps done.
        state: model and optimizer; whole on every rank.
        facts: further entries of the manifest.
        keep_last: whole checkpoints to keep, this one among them.

    Raises:
        CheckpointError: it could not be written. What was there before is untouched.
    """
    target = home / stored.folder_name(step)
    try:
        _write(target, step, state, facts, keep_last)
    except (OSError, SafetensorError) as error:
        _clear_leftovers(home)  # a full disk would stay full
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"checkpoint {target}", f"could not be written: {reason}.", "Earlier checkpoints are untouched."
        ) from error
    return target


def tidy(home: Path, step: int, keep_last: int) -> None:
    """Finish what a run that was killed while it saved had begun: remove leftovers, and what is beyond `keep_last`."""
    try:
        _clear_leftovers(home)
        _prune(home, step, keep_last)
    except OSError as error:
        raise CheckpointError(f"checkpoints in {home}", f"cannot be removed: {error.strerror}.") from error


def _write(target: Path, step: int, state: State, facts: Mapping[str, Any], keep_last: int) -> None:
    home = target.parent
    home.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(home)
    beside = home / f".{target.name}.writing"
    beside.mkdir()
    weights = state.weights()
    save_file(weights, beside / MODEL)
    save_file(state.moments(), beside / OPTIMIZER)
    files = {name: _facts(beside / name) for name in (MODEL, OPTIMIZER)}
    manifest: dict[str, Any] = {
        "format": stored.FORMAT,
        "step": step,
        **facts,
        "weights_sha256": weights_sha256(weights.items()),
        "files": files,
    }
    manifest[SEAL] = stored.seal(manifest)
    (beside / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    mode = (beside / MANIFEST).stat().st_mode
    for path in beside.iterdir():
        path.chmod(mode)  # safetensors writes for this user alone, whatever the umask says
        _sync(path)
    _sync(beside)
    _publish(beside, target)
    _prune(home, step, keep_last)


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": stored.file_sha256(path)}


def _sync(path: Path) -> None:
    """Force a file or folder to the disk: a rename may otherwise reach it before the data does."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _publish(beside: Path, target: Path) -> None:
    if target.exists():  # the same step again, after resuming from an earlier one
        target.rename(target.with_name(f".{target.name}.old"))
    beside.rename(target)
    _sync(target.parent)
    _clear_leftovers(target.parent)


def _prune(home: Path, step: int, keep_last: int) -> None:
    """Remove whole checkpoints beyond the newest `keep_last`; hidden by a rename first, so that none is half removed.

    Torn ones do not count, nor do those of later steps: a run that came here passed them by. Else they would push out
    the good one that was just written.
    """
    older = [path for path in stored.candidates(home) if (stored.step_of(path) or 0) <= step]
    for path in [path for path in older if stored.is_whole(path)][keep_last:]:
        path.rename(path.with_name(f".{path.name}.old"))
    _clear_leftovers(home)


def _clear_leftovers(home: Path) -> None:
    """Remove what a killed run left: half-written checkpoints, and ones on their way out."""
    for path in home.glob(".step-*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def load(checkpoint: Stored, state: State) -> None:
    """Put a checkpoint into the model and the optimizer of this rank.

    Raises:
        CheckpointError: a file cannot be read here, or its tensors are not the model's.
    """
    weights, moments = _read(checkpoint.path / MODEL), _read(checkpoint.path / OPTIMIZER)
    wanted = dict(state_items(state.model))
    _require_same(checkpoint, weights, wanted)
    _require_trained(checkpoint, moments, state.optimizer)
    with torch.no_grad():
        for name, tensor in wanted.items():
            local(tensor).copy_(weights[name])
    load_named_state(state.optimizer, moments)


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}", f"cannot be read: {error}.", "Every rank needs to see the run folder."
        ) from error


def _require_trained(checkpoint: Stored, moments: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Refuse to drop the state of parameters that were trained and are frozen now."""
    trained = {name for group in optimizer.param_groups for name in group[NAMES]}
    frozen = sorted({key.partition("/")[2] for key in moments} - trained)
    if frozen:
        raise CheckpointError(
            f"checkpoint {checkpoint.path}",
            f"has optimizer state of parameters that are not trained now: {first_of(frozen)}.",
            "The model must be the one that was saved.",
        )


def _require_same(checkpoint: Stored, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    other = [n for n in wanted if n in found and found[n].shape != wanted[n].shape]
    for names, what in ((missing, "lacks"), (extra, "has beyond the model's"), (other, "has in another shape")):
        if names:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}",
                f"{what}: {first_of(names)}.",
                "The model must be the one that was saved.",
            )
