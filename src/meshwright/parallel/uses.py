"""Uses of a tied parameter told apart.

In exact mode each use's gradient goes on the grid by itself, as it must where a pipeline has the two on two stages.
While the passes of a step run, every place of a tied parameter but the first holds a parameter of its own that shares
the memory of the first: the gradients arrive apart, and an update reaches all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch.nn as nn

from meshwright.parallel.leaves import Leaf, local
from meshwright.parallel.twins import Place, parted_places


@final
class Uses:
    """The places of a model's tied parameters.

    Args:
        model: bare, its parameters in their final memory.
        leaves: of its trained parameters.

    Attributes:
        further: for each further use of a trained parameter the number of its leaf, and the parameter put there.
    """

    def __init__(self, model: nn.Module, leaves: Sequence[Leaf]) -> None:
        numbers = {id(leaf.parameter): number for number, leaf in enumerate(leaves)}
        self.active = False
        self._places: list[tuple[Place, nn.Parameter, nn.Parameter]] = []
        self.further: list[tuple[int, nn.Parameter]] = []
        for first, *others in parted_places(model):
            number = numbers.get(id(first.parameter))
            for place in others:
                if number is None:
                    continue  # not trained
                own = nn.Parameter(local(first.parameter))
                self._places.append((place, first.parameter, own))
                self.further.append((number, own))

    def put(self) -> None:
        """Passes begin, if they have not."""
        if self.active:
            return
        self.active = True
        for place, _, own in self._places:
            place.module._parameters[place.attribute] = own

    def take_away(self) -> None:
        """Passes are over: the tie is whole again."""
        self.active = False
        for place, first, _ in self._places:
            place.module._parameters[place.attribute] = first
