"""Checkpoints as files: finding, reading and checking them. No torch, and nothing in them is run.

A checkpoint is a folder `step-00000020` that holds

    manifest.json           step, recipe, layout, digests, the size and SHA-256 of each other file, and its own seal
    model.safetensors       parameters and persistent buffers, a tied tensor once under its first name
    optimizer.safetensors   `STATE/PARAMETER` -> tensor

It is written beside, under a name that starts with a dot, and published by one rename. What has no manifest, or files
that do not match it, is torn: resuming passes it by with a line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from meshwright.errors import CheckpointError

FORMAT: Final = 1
CHECKPOINTS: Final = "checkpoints"
MANIFEST: Final = "manifest.json"
MODEL: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"

SEAL: Final = "manifest_sha256"
"""Key of a manifest that holds the SHA-256 of all its other keys."""

DTYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
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
    """Whatever has a checkpoint's name, newest first. `root` is a run folder or its `checkpoints`."""
    home = root / CHECKPOINTS if (root / CHECKPOINTS).is_dir() else root
    try:
        found = [(step, path) for path in home.iterdir() if (step := step_of(path)) is not None]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"checkpoints in {home}", f"cannot be listed: {error.strerror}.") from error
    return [path for _, path in sorted(found, reverse=True)]


def read(folder: Path) -> Stored:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointError: there is none, it is of another format, or it is not as it was written.
    """
    asked = f"checkpoint {folder}"
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        version, step, sealed = manifest["format"], manifest["step"], manifest.get(SEAL)
    except FileNotFoundError as error:
        raise CheckpointError(asked, f"has no {MANIFEST}.") from error
    except OSError as error:
        raise CheckpointError(asked, f"cannot be read: {error.strerror}.") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(asked, f"has a broken {MANIFEST} ({type(error).__name__}: {error}).") from error
    if version != FORMAT:
        raise CheckpointError(asked, f"is of format {version}; this version reads format {FORMAT}.")
    if sealed != seal(manifest):
        raise CheckpointError(asked, f"has a {MANIFEST} that differs from its own SHA-256.")
    if step_of(folder) not in (None, step):
        raise CheckpointError(asked, f"holds step {step}.", f"Call it {folder_name(step)} again.")
    return Stored(folder, step, manifest)


def seal(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest but for its own seal. Files are covered by their SHA-256 in it, and it by this."""
    rest = {name: value for name, value in manifest.items() if name != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def check_files(stored: Stored, *, hashes: bool) -> None:
    """Compare a checkpoint's files with its manifest: sizes, and with `hashes` their SHA-256.

    Raises:
        CheckpointError: a file is missing, cut short or changed.
    """
    asked = f"checkpoint {stored.path}"
    for name, facts in stored.manifest["files"].items():
        path = stored.path / name
        if Path(name).name != name or not path.is_file():
            raise CheckpointError(asked, f"lacks {name}.")
        if path.stat().st_size != facts["bytes"]:
            raise CheckpointError(asked, f"has {path.stat().st_size} of {facts['bytes']} bytes of {name}.")
        if hashes and file_sha256(path) != facts["sha256"]:
            raise CheckpointError(asked, f"has a {name} that differs from its SHA-256.")


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
    """SHA-256 of a file, in hexadecimal.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}", f"cannot be read: {error.strerror}.") from error


def weights_sha256(path: Path) -> str:
    """The digest of a model.safetensors: for each sorted name, its dtype and shape as text ended by 0, then the bytes.

    Raises:
        CheckpointError: it cannot be read, or is no safetensors file.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            base, entries = _header(path, file)
            for name, (dtype, shape, start, end) in sorted(entries.items()):
                digest.update(f"{name}\0{dtype}\0{shape}\0".encode())
                file.seek(base + start)
                _update(digest, file, end - start, path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}", "is missing.") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path}", f"has a broken safetensors header ({why}).") from error
    return digest.hexdigest()


def _header(path: Path, file: IO[bytes]) -> tuple[int, dict[str, tuple[str, str, int, int]]]:
    """Where tensors start, and their entries (https://github.com/safetensors/safetensors, "Format")."""
    prefix = file.read(8)
    size = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or size > path.stat().st_size - 8:
        raise CheckpointError(f"{path}", "is no safetensors file.")
    entries = {}
    for name, entry in json.loads(file.read(size)).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            entries[name] = (DTYPES[entry["dtype"]], ",".join(map(str, entry["shape"])), start, end)
    return 8 + size, entries


def _update(digest: Any, file: IO[bytes], count: int, path: Path) -> None:
    while count:
        chunk = file.read(min(count, 1 << 20))
        if not chunk:
            raise CheckpointError(f"{path}", f"ends {count} bytes early.")
        digest.update(chunk)
        count -= len(chunk)
