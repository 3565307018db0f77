"""One forward pass of the whole model and its loss, and the backward pass of what comes after the last block.

Each storage that lives until backward has one owner:

    a block      what was made in its forward pass, and its input (the residual stream); its output is the next one's
    before       what was made before the first block, and is not the residual stream (rotary tables, masks)
    after        what was made behind the last block up to the model's result, and the last block's output
    loss         the model's result, and what was made once it returned

What is made between two blocks counts to the first of them. A model without blocks is loss all over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.nn as nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.models.trace_memory import Life, LiveBytes, storage_bytes, tensors_in
from meshwright.models.trace_unit import Contexts, Measured, measure


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPass:
    """What one block kept in a pass.

    Attributes:
        kept: bytes that it owns until backward.
        kept_input: of these, its inputs.
        inputs: bytes of all its inputs that it would own.
        calls: how often it was called.
    """

    kept: int
    kept_input: int
    inputs: int
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """One pass in bytes.

    Attributes:
        blocks: one for each block.
        measured: of some blocks, by index and mode.
        before: owned by what comes before, the batch included.
        after: owned by what comes after.
        loss_kept: owned by the loss.
        loss_forward: the most that the loss needs until backward begins.
        loss_peak: the most that it needs once backward has begun.
        widths: last sizes of the residual stream and of the model's result; 0 if there is none.
    """

    blocks: tuple[BlockPass, ...]
    measured: Mapping[int, dict[str, Measured]]
    before: int
    after: int
    loss_kept: int
    loss_forward: int
    loss_peak: int
    widths: tuple[int, int]


def run_pass(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    objective: Callable[[nn.Module, Any], torch.Tensor],
    batch: Any,
    known: Sequence[torch.Tensor],
    modes: Mapping[str, Contexts],
    measured: Collection[int],
    dress: Callable[[nn.Module, Sequence[nn.Module]], None],
) -> Passed:
    """Run the model on a batch inside a stage, and see who keeps what.

    Args:
        model: a copy that this may change; it serves for one pass.
        blocks: its repeated blocks.
        objective: (model, batch) -> what backward starts from.
        batch: of the stage.
        known: tensors whose storages do not count: parameters, buffers.
        modes: recompute modes to measure blocks in, besides none.
        measured: indices of the blocks to measure.
        dress: registers the hooks that cast; what those of a block make counts to that block.
    """
    watch = _Watch(LiveBytes([*known, *tensors_in(batch)]), modes, measured)
    watch.attach(model, blocks)
    dress(model, blocks)
    with watch.lives:
        start = objective(model, batch)
        forward_end = watch.lives.now
        owners, begin = watch.owners(len(blocks)), watch.last_exit
        others = [life for owner, lives in owners.items() if owner != "loss" for life in lives]
        _backward_to(start, watch.last_edges)
    return Passed(
        blocks=tuple(watch.block_pass(i, owners) for i in range(len(blocks))),
        measured=watch.found,
        before=_total(owners["before"]) + storage_bytes(tensors_in(batch)),
        after=_total(owners["after"]),
        loss_kept=_total(owners["loss"]),
        loss_forward=watch.lives.peak(begin, forward_end, others),
        loss_peak=watch.lives.peak(forward_end, None, others),
        widths=(watch.stream_width, watch.result_width),
    )


def _backward_to(start: torch.Tensor, edges: Sequence[GradientEdge]) -> None:
    """Go back to the last block's output and no further; all the way if no gradient arrives there."""
    if edges and start.requires_grad:
        torch.autograd.grad(start, edges, allow_unused=True)
    elif start.requires_grad:
        start.backward()  # type: ignore[no-untyped-call]


def _total(lives: Sequence[Life]) -> int:
    return sum(life.nbytes for life in lives)


@dataclass(slots=True)
class _Visits:
    """What is known of one block's calls."""

    calls: int = 0
    inputs: dict[int, Life] = field(default_factory=dict)
    """By identity: what it was called with and would own."""


@final
class _Watch:
    """Follows one pass through the blocks."""

    def __init__(self, lives: LiveBytes, modes: Mapping[str, Contexts], measured: Collection[int]) -> None:
        self.lives, self.modes, self.to_measure = lives, modes, measured
        self.found: dict[int, dict[str, Measured]] = {}
        self.visits: dict[int, _Visits] = {}
        self.spans: list[tuple[int, int]] = []
        """(event count, block) as each call began: what is made from then on counts to that block."""
        self.is_open = False
        self.last_exit = self.model_exit = 0
        self.last_outputs: set[int] = set()
        self.results: set[int] = set()
        self.last_edges: list[GradientEdge] = []
        self.stream_width = self.result_width = 0

    def attach(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Wrap the forwards of the model and its blocks; hooks that are registered later run inside a block's span."""
        inner = model.forward

        def whole(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            self._model_returns(result)
            return result

        model.forward = whole
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda module, args, index=index: self._begin(index))
            block.forward = self._wrapped(index, block, block.forward)

    def _begin(self, index: int) -> None:
        """A block's call begins: before the hooks that cast its inputs, or where its forward is called directly."""
        self.spans.append((self.lives.now, index))
        self.is_open = True

    def _wrapped(self, index: int, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._called(index, (args, kwargs))
            if index in self.to_measure and index not in self.found:
                self.found[index] = measure(block, forward, (args, kwargs), self.lives, self.modes)
            output = forward(*args, **kwargs)
            self._returned(output)
            return output

        return call

    def _called(self, index: int, call: Any) -> None:
        if not self.is_open:
            self._begin(index)
        self.is_open = False
        visits, (began, _) = self.visits.setdefault(index, _Visits()), self.spans[-1]
        visits.calls += 1
        for tensor in tensors_in(call):
            life = self.lives.life_of(tensor)
            is_stream = tensor.requires_grad or (life is not None and id(life) in self.last_outputs)
            if life is not None and (is_stream or life.born >= began):
                visits.inputs[id(life)] = life
            if tensor.is_floating_point() and tensor.ndim > 1 and not self.stream_width:
                self.stream_width = tensor.shape[-1]

    def _returned(self, output: Any) -> None:
        self.last_exit = self.lives.now
        self.last_outputs = {id(life) for life in self.lives.lives_of(output)}
        self.last_edges = [get_gradient_edge(tensor) for tensor in tensors_in(output) if tensor.requires_grad]

    def _model_returns(self, result: Any) -> None:
        self.model_exit = self.lives.now
        self.results = {id(life) for life in self.lives.lives_of(result)}
        logits = getattr(result, "logits", result)
        if isinstance(logits, torch.Tensor) and logits.ndim > 1 and logits.is_floating_point():
            self.result_width = logits.shape[-1]

    def owners(self, count: int) -> dict[str | int, list[Life]]:
        """Who owns what lives now: `before`, the index of a block, `after` or `loss`."""
        owned: dict[str | int, list[Life]] = {name: [] for name in ("before", *range(count), "after", "loss")}
        taken: dict[int, set[int]] = {}
        for index, visits in self.visits.items():
            for identity in visits.inputs:
                taken.setdefault(identity, set()).add(index)
        for life in self.lives.living():
            owned[self._owner(life, taken.get(id(life), set()))].append(life)
        return owned

    def _owner(self, life: Life, takers: set[int]) -> str | int:
        if not self.spans:
            return "loss"
        if len(takers) == 1:
            return next(iter(takers))
        if life.born < self.spans[0][0]:
            return "before"
        if life.born < self.last_exit:
            maker = max((span for span in self.spans if span[0] <= life.born), key=lambda span: span[0])[1]
            return "after" if id(life) in self.last_outputs else maker
        return "after" if life.born < self.model_exit and id(life) not in self.results else "loss"

    def block_pass(self, index: int, owners: Mapping[str | int, Sequence[Life]]) -> BlockPass:
        """One block's part."""
        visits, mine = self.visits.get(index, _Visits()), owners[index]
        return BlockPass(
            kept=_total(mine),
            kept_input=sum(life.nbytes for life in mine if id(life) in visits.inputs),
            inputs=_total(list(visits.inputs.values())),
            calls=visits.calls,
        )
