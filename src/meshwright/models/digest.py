"""One digest of a model's weights: equal if and only if names, types, shapes and every bit are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from meshwright.models.anatomy import bare_name


def state_items(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers in the sorted order of names; a tied tensor once, under its first name."""
    first: dict[int, tuple[str, Tensor]] = {}
    items = [(bare_name(name), value) for name, value in model.state_dict(keep_vars=True).items()]
    for name, value in sorted(items, key=lambda item: item[0]):
        if isinstance(value, Tensor) and not name.endswith("_extra_state"):  # which may be anything
            first.setdefault(id(value), (name, value))
    return list(first.values())


@final
class Hasher:
    """SHA-256 over tensors that are given one at a time, in the sorted order of their names.

    Of each: name, dtype (`float32`) and shape (`4,5`; empty for a scalar) as UTF-8, each ended by a zero byte, then the
    raw bytes, contiguous and little-endian, as on every machine that torch runs on.
    """

    def __init__(self) -> None:
        self._total = hashlib.sha256()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, whole."""
        dtype, shape = str(tensor.dtype).removeprefix("torch."), ",".join(map(str, tensor.shape))
        self._total.update(f"{name}\0{dtype}\0{shape}\0".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        raw: Any = flat.view(torch.uint8).numpy()  # a buffer, which the stubs do not say
        self._total.update(raw)

    def hexdigest(self) -> str:
        """Of what was given so far."""
        return self._total.hexdigest()


def weights_sha256(items: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of whole tensors by name, in any order."""
    hasher = Hasher()
    for name, tensor in sorted(items, key=lambda item: item[0]):
        hasher.add(name, tensor)
    return hasher.hexdigest()
