"""Which units of ZeRO a rank calls, and in which order: it must be the same on all ranks.

A unit's parameters are gathered when it is called, by a collective. Ranks that call different units, or in another
order, stand in different collectives: that ends in a time-out, in a crash of the backend, or, where the shapes happen
to be equal, in weights of one unit filled into another without a word. So each rank

    keeps a hash of its calls, which must be equal on all ranks before the step's update is made;
    looks before each backward pass whether a unit was not called at all;
    tells `entered` where it is, so that a time-out or a crash can be explained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
import torch.nn as nn

from meshwright.errors import RankDisagreement, SpecError
from meshwright.parallel.seeding import key_of, mixed
from meshwright.spec.nearest import first_of

_MASK: Final = (1 << 64) - 1
_BITS: Final = 14
"""Of the hash that is compared: the square of the sum over 4096 ranks is still exact in fp64."""


@final
class Calls:
    """The calls of units on this rank, since `begin`.

    Args:
        entered: told the name of each unit as it is called.
    """

    def __init__(self, entered: Callable[[str], None]) -> None:
        self._entered = entered
        self._names: list[str] = []
        self._called: set[int] = set()
        self._hash = self._count = 0

    def watch(self, unit: nn.Module, name: str) -> None:
        """Have the calls of a unit seen, before FSDP's hook that gathers, though it was registered earlier."""
        number, key = len(self._names), key_of(name)
        self._names.append(name)

        def enter(module: nn.Module, args: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # recompute, in an order that the forward pass has given
            self._entered(name)
            self._called.add(number)  # without gradients too: a reentrant checkpoint asks for them later
            self._note(key)

        hook = torch.compiler.disable(enter)  # type: ignore[no-untyped-call]
        unit.register_forward_pre_hook(hook, prepend=True)

    def begin(self) -> None:
        """A new step."""
        self._called.clear()
        self._hash = self._count = 0

    def ended(self, name: str) -> None:
        """The backward pass of all calls of a unit is over, and its gradients are summed: a collective too."""
        self._note(~key_of(name))

    def _note(self, key: int) -> None:
        self._hash, self._count = mixed((self._hash ^ key) & _MASK), self._count + 1

    def require_all(self) -> None:
        """Refuse a backward pass to which some unit did not contribute: other ranks would wait there.

        Raises:
            SpecError: naming the units.
        """
        missing = [name for number, name in enumerate(self._names) if number not in self._called]
        if missing:
            raise SpecError(
                f"{len(missing)} of {len(self._names)} units of ZeRO ({first_of(missing)})",
                "were not called in a microbatch. Every rank must call every unit in each, in the same order: a call "
                "gathers its parameters from all ranks.",
                'Nearest: name the modules that are always called in layout.units, such as units = "encoder.layers.*", '
                "or train with ddp.",
            )
        self._entered(f"after {self._count} calls")
        self._called.clear()

    def numbers(self) -> list[float]:
        """What `require_same` needs of each rank; as many numbers in every step."""
        short = float(self._hash >> (64 - _BITS))
        return [short, short * short]

    def require_same(self, summed: Sequence[float], ranks: int) -> None:
        """Refuse to go on if ranks called different units.

        Args:
            summed: `numbers`, summed over the ranks.
            ranks: how many; n x (sum of squares) = (sum)^2 exactly if all numbers are equal.

        Raises:
            RankDisagreement: they did; the same on every rank.
        """
        total, squares = summed
        if ranks * squares != total * total:
            raise RankDisagreement(
                "the units of ZeRO",
                "were called in another order, or another number of times, by some ranks than by others in this step: "
                "weights may have been gathered into the wrong module.",
                "No weight was changed by this step. Let no rank's data decide which modules are called, name other "
                "modules in layout.units, or train with ddp.",
            )


def never_a_view(unit: nn.Module) -> None:
    """Have a unit return no views: FSDP's hook on its output is lost where a view is changed in place."""

    def own(output: Any) -> Any:
        is_view = isinstance(output, torch.Tensor) and output.requires_grad and output._is_view()
        return output.clone() if is_view else output

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return own(output)
        return type(output)(map(own, output)) if type(output) in (tuple, list) else None

    unit.register_forward_hook(after)
