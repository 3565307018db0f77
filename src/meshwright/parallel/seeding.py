"""Dropout that does not know how many ranks there are: masks are drawn from (seed, step, microbatch, module name).

Seeding points are the model as a whole, each repeated block, and each dropout module outside the blocks. On entry a
point seeds torch's default generators, so everything inside draws numbers of its own, whatever was drawn before it:

* a data-parallel rank that takes microbatch 5 draws what one process draws for its microbatch 5;
* a pipeline stage does not miss the numbers that the stages before it draw;
* recompute replays a block alone. `parallel/recompute.py` keeps the points outside the recomputed region; inside, they
  would seed from the microbatch that is current during backward, which under 1F1B is another one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any, final

import numpy
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle

from meshwright.models.anatomy import bare_name, repeated_blocks
from meshwright.models.gpt2 import Gpt2
from meshwright.models.llama import Llama

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: multiples of it visit every 64-bit number


def mixed(z: int) -> int:
    """A 64-bit number in which every bit depends on every bit of `z`.

    Source: the finaliser of splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def key_of(text: str) -> int:
    """64 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@final
class MicrobatchSeeds:
    """Seeds the seeding points of a model; the step loop says where it is with `at`.

    [Note: calls] A point that is entered several times in a microbatch (a shared dropout, a model called twice by its
    loss) counts its calls, and each has its own masks. `at` starts the count again.

    [Note: checkpoint in the user's model] Where the user's own forward calls torch.utils.checkpoint, points lie inside
    the recomputed region and are entered again during backward. There the microbatch and the counts of the forward pass
    are gone, but checkpoint has put back the generator, and a generator knows the seed it was last given. So each
    forward entry notes "after this seed came that one", and an entry during backward follows the notes.
    """

    def __init__(self, seed: int) -> None:
        self._base = key_of(f"dropout\0{seed}")
        self._step = -1
        self._position = mixed(self._base)
        self._calls: dict[int, int] = {}  # key of a point -> entries in this microbatch
        self._next: dict[int, int] = {}  # seed in force -> seed that the next point gave, within this step
        self._models: list[nn.Module] = []
        self._generators = generators_of(self._models)

    def at(self, step: int, microbatch: int) -> None:
        """What follows is the forward pass of this microbatch (its index in the whole global batch) of this step."""
        if step != self._step:
            self._step = step
            self._next.clear()  # every backward of the step before is done
            self._generators = generators_of(self._models)  # the model may have moved
        self._position = mixed((mixed((self._base + step * _GOLDEN) & _MASK) + (microbatch + 1) * _GOLDEN) & _MASK)
        self._calls.clear()
        self._give(self._position >> 1)
        if self._models:  # a loss function of the user's own may draw from these
            random.seed(self._position)
            numpy.random.seed(self._position & 0xFFFFFFFF)

    def attach(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]] | None = None) -> list[RemovableHandle]:
        """Register the seeding points as forward pre-hooks; they act while their module is in training mode.

        Args:
            model: bare, before DDP wraps it.
            blocks: the repeated blocks by qualified name; None finds them. A pipeline stage passes its own, under the
                names that they have in the whole model.

        Returns:
            Handles that take the hooks off again.
        """
        if not may_draw(model):
            return []
        self._models.append(model)
        self._generators = generators_of(self._models)
        blocks = repeated_blocks(model) if blocks is None else blocks
        points = [("", model), *blocks, *_dropouts_outside(model, blocks)]
        return [module.register_forward_pre_hook(self._hook(name)) for name, module in points]

    def enter(self, name: str) -> None:
        """Enter a point by hand, where its module is not called as one: a pipeline's first stage begins the model."""
        if self._models:
            self._enter(key_of(name))

    def state(self) -> list[torch.Tensor]:
        """Where the generators are; for a loss function that draws before it calls the model, and after."""
        return [generator.get_state() for generator in self._generators] if self._models else []

    def restore(self, state: list[torch.Tensor]) -> None:
        """Put the generators back to where they were."""
        for generator, its in zip(self._generators, state, strict=False):
            generator.set_state(its)

    def _hook(self, name: str) -> Any:
        """A pre-hook that seeds for one point. A closure, because a deep copy of the module must share this object."""
        key = key_of(name)

        def seed_here(module: nn.Module, args: Any) -> None:
            if module.training:
                self._enter(key)

        # To torch.compile this is no part of the graph.
        return torch.compiler.disable(seed_here)  # type: ignore[no-untyped-call]

    def _enter(self, key: int) -> None:
        before = torch.default_generator.initial_seed()
        if torch._C._current_graph_task_id() != -1:  # in backward; see [Note: checkpoint in the user's model]
            seed = self._next.get(before)
            if seed is not None:
                self._give(seed)
            return
        calls = self._calls.get(key, 0)
        self._calls[key] = calls + 1
        seed = mixed(((self._position ^ key) + calls * _GOLDEN) & _MASK) >> 1
        self._next[before] = seed
        self._give(seed)

    def _give(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)


def may_draw(model: nn.Module) -> bool:
    """Can a forward pass in training draw random numbers? For a model of the user's own the answer is always yes."""
    return not isinstance(model, Gpt2 | Llama) or model.shape.dropout > 0.0


def _dropouts_outside(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    inside = {id(module) for _, block in blocks for module in block.modules()}
    inside.add(id(model))  # has a point of its own
    named = [(bare_name(name), module) for name, module in model.named_modules()]
    return [(name, m) for name, m in named if isinstance(m, _DropoutNd) and id(m) not in inside]


def generators_of(models: Sequence[nn.Module]) -> tuple[torch.Generator, ...]:
    """The CPU's default generator, and those of the CUDA devices that hold the models."""
    devices = {p.device for model in models for p in model.parameters() if p.device.type == "cuda"}
    indices = sorted(torch.cuda.current_device() if device.index is None else device.index for device in devices)
    return (torch.default_generator, *(torch.cuda.default_generators[index] for index in indices))
