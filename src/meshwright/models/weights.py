"""Weights in safetensors files, read by slices: each rank reads the rows that it has, and never a whole model.

Nothing in such a file is run. Pickles (`.bin`, `.pt`) are refused: reading one runs whatever its writer put in.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open

from meshwright.errors import CheckpointError, SpecError
from meshwright.models.built import Index
from meshwright.spec.nearest import first_of

ONE_FILE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_OTHERS: Final = ("*.safetensors", "pytorch_model*.bin", "*.pth", "*.gguf", "*.h5", "*.msgpack")
OF_ONE_MODEL: Final = "config.json and weights must be of one model."
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor in a file.

    Attributes:
        name: that the file has for it.
        path: the file.
        shape: of the whole tensor.
        dtype: as the file spells it: `BF16`.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Match:
    """Files and module, name by name.

    Attributes:
        shapes: of the module's parameters and persistent buffers, a tied one under the first of its names.
        floats: those of them that are floating-point numbers.
        sources: where each of them is; several places for a tied one, none for what no file has.
        left_out: names in the files that the module does not have.
    """

    shapes: dict[str, tuple[int, ...]]
    floats: frozenset[str]
    sources: dict[str, list[Held]]
    left_out: list[str]

    @property
    def missing(self) -> list[str]:
        """First names of what no file has."""
        return [name for name, places in self.sources.items() if not places]


def find_files(folder: Path, asked: str) -> list[Path]:
    """The safetensors files of a folder; none if it holds no weights at all.

    Raises:
        SpecError: it holds weights in another form only.
        CheckpointError: its index is broken, or names a file that is missing.
    """
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    if (folder / INDEX).is_file():
        return _indexed(folder)
    others = sorted({path.name for pattern in _OTHERS for path in folder.glob(pattern)})
    if others:
        raise SpecError(
            asked,
            f"{folder} holds {first_of(others)}, and weights are read from {ONE_FILE} or {INDEX} alone; "
            "a pickle runs its writer's code when it is read.",
            "Save them with save_pretrained(folder), or leave config.json alone in a folder to start afresh.",
        )
    return []


def _indexed(folder: Path) -> list[Path]:
    index = folder / INDEX
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        strays = [name for name in names if Path(name).name != name]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"weights in {folder}", f"have a broken {INDEX} ({type(error).__name__}).") from error
    missing = strays or [name for name in names if not (folder / name).is_file()] or ["it names none"] * (not names)
    if missing:
        rule = f"lack {len(missing)} of the {len(names)} files that {INDEX} names: {first_of(missing)}."
        raise CheckpointError(f"weights in {folder}", rule, "Copy the folder again.")
    return [folder / name for name in names]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"weights in {path}", f"cannot be read: {error}.", "Copy the file again.") from error


def read_headers(paths: Sequence[Path]) -> list[Held]:
    """What is in the files, without reading it.

    Raises:
        CheckpointError: a file is torn, or holds numbers that are not trained.
    """
    found = []
    for path in paths:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 -- no dict, and it has no iterator
                piece = file.get_slice(name)
                found.append(Held(name, path, tuple(piece.get_shape()), piece.get_dtype()))
    return found


def matched(held: Sequence[Held], model: nn.Module, prefix: str) -> Match:
    """Find each tensor of a module in the files, by any of its names.

    Args:
        held: in the files.
        model: bare; parameters may be on the meta device.
        prefix: what the module's names begin with where files of a model without a head leave it out.
    """
    tensors = model.state_dict(keep_vars=True)
    places: dict[str, Held] = {}
    for piece in held:
        longer = f"{prefix}.{piece.name}"
        places[longer if piece.name not in tensors and longer in tensors else piece.name] = piece
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in sorted(tensors.items()):
        names[id(tensor)].append(name)
    sources = {tied[0]: [places[name] for name in tied if name in places] for tied in names.values()}
    shapes = {name: tuple(tensors[name].shape) for name in sources}
    floats = frozenset(name for name in sources if tensors[name].is_floating_point())
    return Match(shapes, floats, sources, sorted(places.keys() - tensors.keys()))


def require_same_shapes(match: Match) -> None:
    """Refuse files that are not of this module.

    Raises:
        CheckpointError: naming the first tensor that differs, with both shapes.
    """
    for name, shape in match.shapes.items():
        for piece in match.sources[name]:
            where = f"weights in {piece.path}"
            if piece.shape != shape:
                rule = f"hold {piece.name} of shape {piece.shape}; by config.json it has {shape}."
                raise CheckpointError(where, rule, OF_ONE_MODEL)
            if name in match.floats and piece.dtype not in _FLOATS:
                rule = f"hold {piece.name} in {piece.dtype}; what is trained is one of {', '.join(sorted(_FLOATS))}."
                raise CheckpointError(where, rule, "Take the weights from before they were quantised.")


def read_part(sources: Mapping[str, list[Held]], name: str, part: torch.Tensor, index: Index) -> None:
    """Read a part of a tensor into `part`, in the type of `part`.

    Raises:
        CheckpointError: a file cannot be read, or holds a tied tensor twice and not twice the same.
    """
    if not part.numel():
        return
    first, *again = sources[name]
    values = _part(first, index)
    part.copy_(values)
    for piece in again:
        if not torch.equal(_part(piece, index), values):
            rule = f"are tied by config.json, and differ between {first.path.name} and {piece.path.name}."
            nearest = "Set tie_word_embeddings to false in config.json."
            raise CheckpointError(f"weights {first.name} and {piece.name}", rule, nearest)


def _part(piece: Held, index: Index) -> torch.Tensor:
    with _opened(piece.path) as file:
        tensor: torch.Tensor = file.get_slice(piece.name)[index] if index else file.get_tensor(piece.name)
        return tensor
