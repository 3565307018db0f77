"""Saving and loading the state of a training. All ranks gather, rank 0 writes; every rank loads what it has of it.

Contract 8: written beside, published by one rename, so that a kill at any moment leaves the last good one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open

from meshwright.errors import CheckpointError
from meshwright.parallel.homes import Homes
from meshwright.parallel.leaves import local
from meshwright.spec.nearest import first_of
from meshwright.train import stored
from meshwright.train.agree import Agreement
from meshwright.train.optimizer import NAMES, load_named_state
from meshwright.train.state import COUNTERS, Piece, State
from meshwright.train.stored import MANIFEST, MODEL, OPTIMIZER, SEAL, Stored
from meshwright.train.tensorfile import TensorWriter, in_file_order

T = TypeVar("T")


def save(
    home: Path, step: int, state: State, facts: Mapping[str, Any], keep_last: int, agreement: Agreement
) -> tuple[Path, str]:
    """Save and publish a checkpoint; collective. Rank 0 writes, tensor by tensor; every rank learns how it went.

    Args:
        home: the `checkpoints` folder.
        step: optimizer steps done.
        state: model and optimizer.
        facts: further entries of the manifest.
        keep_last: whole checkpoints to keep, this one among them.
        agreement: of the ranks.

    Returns:
        The checkpoint's folder and its weights_sha256.

    Raises:
        CheckpointError: it could not be written. What was there before is untouched.
    """
    target = home / stored.folder_name(step)
    beside = home / f".{target.name}.writing"
    agreement.on_rank_0(lambda: _attempt(target, partial(_begin, home, beside)))
    for name, pieces in ((MODEL, state.weights()), (OPTIMIZER, state.moments())):
        _write(target, beside / name, pieces, agreement)
    digest = agreement.on_rank_0(lambda: _attempt(target, partial(_publish, beside, target, step, facts, keep_last)))
    return target, digest


def _attempt(target: Path, work: Callable[[], T]) -> T:
    """Do a part of saving; what the disk says against it becomes one line."""
    try:
        return work()
    except OSError as error:
        _clear_leftovers(target.parent)  # a full disk would stay full
        reason = error.strerror or str(error)
        raise CheckpointError(
            f"checkpoint {target}", f"could not be written: {reason}.", "Earlier checkpoints are untouched."
        ) from error


def _begin(home: Path, beside: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(home)
    beside.mkdir()


def _write(target: Path, path: Path, pieces: list[Piece], agreement: Agreement) -> None:
    """Gather one piece after the other; rank 0 writes them."""
    by_name = {piece.name: piece for piece in pieces}
    entries = in_file_order([piece.entry for piece in pieces])
    writer = TensorWriter(path, entries) if agreement.rank == 0 else None
    for entry in entries:
        piece = by_name[entry.name]
        if writer is not None:
            tensor = piece.whole()
            assert tensor is not None, "rank 0 has what it put together"
            writer.add(tensor)
        elif piece.is_cut:
            piece.whole()
    agreement.on_rank_0(lambda: _attempt(target, _close_of(writer)))


def _close_of(writer: TensorWriter | None) -> Callable[[], None]:
    assert writer is not None, "rank 0 writes"
    return writer.close


def tidy(home: Path, step: int, keep_last: int) -> None:
    """Finish what a run that was killed while it saved had begun: remove leftovers, and what is beyond `keep_last`."""
    try:
        _clear_leftovers(home)
        _prune(home, step, keep_last)
    except OSError as error:
        raise CheckpointError(f"checkpoints in {home}", f"cannot be removed: {error.strerror}.") from error


def _publish(beside: Path, target: Path, step: int, facts: Mapping[str, Any], keep_last: int) -> str:
    files = {name: _facts(beside / name) for name in (MODEL, OPTIMIZER)}
    manifest: dict[str, Any] = {
        "format": stored.FORMAT,
        "step": step,
        **facts,
        "weights_sha256": stored.weights_sha256(beside / MODEL),
        "files": files,
    }
    manifest[SEAL] = stored.seal(manifest)
    (beside / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _sync(beside / MANIFEST)
    _sync(beside)
    _rename(beside, target)
    _prune(target.parent, step, keep_last)
    return str(manifest["weights_sha256"])


def _facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": stored.file_sha256(path)}


def _sync(path: Path) -> None:
    """Force a file or folder to the disk: a rename may otherwise reach it before the data does."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rename(beside: Path, target: Path) -> None:
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
    """Put a checkpoint into the model and the optimizer of this rank, which reads the rows that it has.

    Raises:
        CheckpointError: a file cannot be read here, or its tensors are not the model's.
    """
    with _reading(checkpoint.path / MODEL) as file:
        _require_same(checkpoint, _shapes(file), {name: home.shape for name, home in state.homes.homes.items()})
        with _reading(checkpoint.path / OPTIMIZER) as moments:
            _require_trained(checkpoint, list(moments.keys()), state)
            with torch.no_grad():
                for name, like in state.here():
                    local(like).copy_(_part(file, name, name, like, state.homes))
            load_named_state(state.optimizer, _laid(moments, state))
    state.spreading.refresh()


def _laid(moments: Any, state: State) -> dict[str, torch.Tensor]:
    """This rank's part of every tensor of the optimizer's state, as its leaves want it."""
    leaves = {leaf.name: leaf for leaf in state.leaves}
    found: dict[str, torch.Tensor] = {}
    for key in moments.keys():  # noqa: SIM118 -- an open file, not a dictionary
        kind, _, name = key.partition("/")
        leaf = leaves.get(name)
        if leaf is None:
            continue  # of another stage of a pipeline
        is_number = kind in COUNTERS
        part = moments.get_tensor(key) if is_number else _part(moments, key, name, leaf.parameter, state.homes)
        found[key] = part if is_number else leaf.laid(part)
    return found


def _part(file: Any, key: str, name: str, like: torch.Tensor, homes: Homes) -> torch.Tensor:
    """The part of a tensor in a file that this rank has of a parameter; all of it if nothing is cut."""
    index = homes.index(name, like)
    if not index:
        return cast(torch.Tensor, file.get_tensor(key))
    found = file.get_slice(key)
    shape, wanted = tuple(found.get_shape()), homes.of(name).shape
    if shape != wanted:
        raise CheckpointError(
            f"optimizer state {key}",
            f"has shape {shape}, its parameter {wanted}: it cannot be cut.",
            "Resume on a layout without dp_shard and tp.",
        )
    if any(piece.start == piece.stop for piece in index):
        return local(like).new_empty([piece.stop - piece.start for piece in index])
    return cast(torch.Tensor, found[index])


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Open a safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}", f"cannot be read: {error}.", "Every rank needs to see the run folder."
        ) from error


def _shapes(file: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 -- an open file


def _require_trained(checkpoint: Stored, moments: list[str], state: State) -> None:
    """Refuse to drop the state of parameters that were trained and are frozen now."""
    trained = {name for group in state.optimizer.param_groups for name in group[NAMES]}
    elsewhere = state.homes.homes.keys() - dict(state.here()).keys()
    frozen = sorted({key.partition("/")[2] for key in moments} - trained - elsewhere)
    if frozen:
        raise CheckpointError(
            f"checkpoint {checkpoint.path}",
            f"has optimizer state of parameters that are not trained now: {first_of(frozen)}.",
            "The model must be the one that was saved.",
        )


def _require_same(
    checkpoint: Stored, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    other = [n for n in wanted if n in found and found[n] != wanted[n]]
    for names, what in ((missing, "lacks"), (extra, "has beyond the model's"), (other, "has in another shape")):
        if names:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}",
                f"{what}: {first_of(names)}.",
                "The model must be the one that was saved.",
            )
