"""Checkpoints as files: finding, reading and checking them. No torch, and nothing in them is run.

A checkpoint is a folder `step-00000020` that holds

    manifest.json           step, recipe, layout, digests, and the size and SHA-256 of each other file
    model.safetensors       parameters and persistent buffers, a tied tensor once under its first name
    optimizer.safetensors   `STATE/PARAMETER` -> tensor

It is written beside, under a name that starts with a dot, and published by one rename. What has no manifest, or files
that do not match it, is torn: resuming passes it by with a line.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshwright.errors import CheckpointError

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
MODEL: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"

_DTYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""safetensors' names of types, as torch prints them."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A published checkpoint.

    Attributes:
        path: its folder.
        step: optimizer steps done.
        manifest: the parsed manifest.
    """

    path: Path
    step: int
    manifest: dict[str, Any]


def folder_name(step: int) -> str:
    """`step-00000020`."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name; None for any other name."""
    match = re.fullmatch(r"step-(\d{8,})", folder.name)
    return int(match[1]) if match else None


def candidates(root: Path) -> list[Path]:
    """Folders with a checkpoint's name, newest first. `root` is a run folder or its `checkpoints`."""
    home = root / "checkpoints" if (root / "checkpoints").is_dir() else root
    try:
        found = [(step, path) for path in home.iterdir() if path.is_dir() and (step := step_of(path)) is not None]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"checkpoints in {home}", f"cannot be listed: {error.strerror}.") from error
    return [path for _, path in sorted(found, reverse=True)]


def read(folder: Path) -> Stored:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointError: there is none, or it is of another format.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        step, version, files = int(manifest["step"]), manifest["format"], dict(manifest["files"])
        complete = {MODEL, OPTIMIZER} <= set(files)
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {folder}", f"has no {MANIFEST}.") from error
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}", f"cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {folder}", f"has a broken {MANIFEST} ({type(error).__name__}: {error})."
        ) from error
    if version != FORMAT or not complete:
        raise CheckpointError(f"checkpoint {folder}", f"is of format {version}; this version reads format {FORMAT}.")
    return Stored(folder, step, manifest)


def check_files(stored: Stored, *, hashes: bool) -> None:
    """Compare a checkpoint's files with its manifest: sizes, and with `hashes` their SHA-256.

    Raises:
        CheckpointError: a file is missing, cut short or changed.
    """
    for name, facts in stored.manifest["files"].items():
        path = stored.path / name
        if Path(name).name != name or not path.is_file():
            raise CheckpointError(f"checkpoint {stored.path}", f"lacks {name}.")
        if path.stat().st_size != facts["bytes"]:
            size = path.stat().st_size
            raise CheckpointError(f"checkpoint {stored.path}", f"has {size} of {facts['bytes']} bytes of {name}.")
        if hashes and file_sha256(path) != facts["sha256"]:
            raise CheckpointError(f"checkpoint {stored.path}", f"has a {name} that differs from its SHA-256.")


def is_whole(folder: Path) -> bool:
    """True if manifest and file sizes agree."""
    try:
        check_files(read(folder), hashes=False)
        return True
    except CheckpointError:
        return False


def newest_good(root: Path, *, hashes: bool) -> tuple[Stored | None, list[str]]:
    """The newest whole checkpoint, and a line for each torn one that was passed by.

    Args:
        root: run folder.
        hashes: read every byte; False compares sizes only.
    """
    passed: list[str] = []
    for folder in candidates(root):
        try:
            stored = read(folder)
            check_files(stored, hashes=hashes)
            return stored, passed
        except CheckpointError as error:
            passed.append(f"passed by: {error}")
    return None, passed


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_sha256(path: Path) -> str:
    """The digest of a model.safetensors: for each sorted name, its dtype and shape as text ended by 0, then the bytes.

    Raises:
        CheckpointError: it is no safetensors file.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        base, header = _header(path, file.read(8), file)
        for name in sorted(header):
            entry = header[name]
            shape = ",".join(map(str, entry["shape"]))
            for text in (name, _DTYPES[entry["dtype"]], shape):
                digest.update(text.encode() + b"\0")
            start, end = entry["data_offsets"]
            file.seek(base + start)
            _update(digest, file, end - start)
    return digest.hexdigest()


def _header(path: Path, prefix: bytes, file: Any) -> tuple[int, dict[str, Any]]:
    """Where tensors start, and their entries (https://github.com/safetensors/safetensors, "Format")."""
    size = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or size > path.stat().st_size - 8:
        raise CheckpointError(f"{path}", "is no safetensors file.")
    try:
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        return 8 + size, dict(header)
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}", f"has a broken safetensors header ({error}).") from error


def _update(digest: Any, file: Any, count: int) -> None:
    while count:
        chunk = file.read(min(count, 1 << 20))
        if not chunk:
            raise CheckpointError("a model file", f"ends {count} bytes early.")
        digest.update(chunk)
        count -= len(chunk)
