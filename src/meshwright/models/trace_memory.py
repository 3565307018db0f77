"""Which storages live when: a watch on every operator, for meta, fake and real tensors alike.

Each storage that an operator makes is a `Life`, counted from the operator that made it until nothing holds it any more.
What was there before (parameters, buffers, the batch) is not counted, nor what an operator uses inside its kernel.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors of nested containers (tuples, lists, dicts, and the dict-like outputs of transformers)."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """What tells a storage from all others that live; views share it."""
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind these tensors, each once."""
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@final
class Life:
    """One storage from its making to its end.

    Attributes:
        nbytes: its size.
        ended: nothing holds it any more.
        born: when it was made, as `LiveBytes.now` counts.
        died: when nothing held it any more; None as long as it lives.
        kind: the operator that made it.
    """

    __slots__ = ("born", "died", "kind", "nbytes")

    def __init__(self, nbytes: int, born: int, kind: Any) -> None:
        self.nbytes, self.born, self.kind = nbytes, born, kind
        self.died: int | None = None


@final
class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operators that run inside it.

    Args:
        known: tensors whose storages do not count.
        observe: told of each operator, its arguments and its result.
    """

    def __init__(
        self, known: Iterable[torch.Tensor], observe: Callable[[Any, Any, Any, Any], None] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = list(known)  # held, so that no new storage can be where one of these was
        self._ignored = {storage_key(tensor) for tensor in self._known}
        self._living: dict[int, Life] = {}
        self._observe = observe
        self._is_paused = False
        self.events: list[tuple[Life, int]] = []
        """Each making (+1) and each end (-1), in their order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and look at what it made."""
        result = func(*args, **(kwargs or {}))
        if self._is_paused:
            return result
        for tensor in tensors_in(result):
            self._see(tensor, func)
        if self._observe is not None:
            self._observe(func, args, kwargs or {}, result)
        return result

    @contextmanager
    def apart(self, observe: Callable[[Any, Any, Any, Any], None] | None = None) -> Iterator[LiveBytes]:
        """Inside, another watch sees what is made, and this one does not; all that lives now does not count to it."""
        inner = LiveBytes((), observe)
        inner._ignored = self._ignored | self._living.keys()
        self._is_paused = True
        try:
            with inner:
                yield inner
        finally:
            self._is_paused = False

    @property
    def now(self) -> int:
        """Events so far."""
        return len(self.events)

    def life_of(self, tensor: torch.Tensor) -> Life | None:
        """The life behind a tensor; None if it was there before."""
        return self._living.get(storage_key(tensor))

    def lives_of(self, values: Any) -> list[Life]:
        """The lives behind the tensors of nested containers."""
        found = (self.life_of(tensor) for tensor in tensors_in(values))
        return [life for life in found if life is not None]

    def living(self) -> list[Life]:
        """All that lives now, in the order in which it was made."""
        return list(self._living.values())

    def peak(self, since: int = 0, until: int | None = None, without: Collection[Life] = ()) -> int:
        """The most bytes that lived at once, from one moment to another; those of `without` do not count."""
        left_out = {id(life) for life in without}
        levels = [0]
        for life, sign in self.events[:until]:
            levels.append(levels[-1] + (0 if id(life) in left_out else sign * life.nbytes))
        return max(levels[since:])

    def _see(self, tensor: torch.Tensor, func: Any) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # opaque tensors of some backends have none
            return
        key = int(storage._cdata)
        if key in self._ignored or key in self._living:
            return
        life = Life(storage.nbytes(), len(self.events), func)
        self._living[key] = life
        self.events.append((life, 1))
        weakref.finalize(storage, partial(self._end, key)).atexit = False

    def _end(self, key: int) -> None:
        life = self._living.pop(key)
        life.died = len(self.events)
        self.events.append((life, -1))
