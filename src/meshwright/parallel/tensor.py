"""Tensor parallelism as a function on a module: every parameter becomes this rank's part of it, in place.

What is cut along which dimension says the table of `spec/tensor_rules.py`. Afterwards the module is a smaller module
of plain local tensors under the same names, which DDP, ZeRO, casts, recompute and optimizers treat as any other. Its
forward functions are wrapped one by one with what ranks must tell each other (`tensor_moves.py`); they are no hooks, so
the order among hooks (seeding, ZeRO) never matters, and they run again inside a recomputed region.

    a branch of a block:   part of the sequence -> gather -> column -> (heads, features) -> row -> scatter the sum
    its collectives:       one all-gather and one reduce-scatter in forward, and the same in backward

Gradients that are addends over copies (`Cut.partial`) are left so: whoever steps sums them once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
import torch.nn as nn
import torch.nn.functional as F

from meshwright.errors import LayoutError, SpecError
from meshwright.models.anatomy import bare_name
from meshwright.parallel.cuts import Cut
from meshwright.parallel.masks import drop_features, drop_sequence, with_whole_masks
from meshwright.parallel.seeding import may_draw
from meshwright.parallel.tensor_check import Found, find_styled, require_sound
from meshwright.parallel.tensor_loss import VocabularyPart, here_or_none
from meshwright.parallel.tensor_moves import (
    TensorAxis,
    add_up,
    enter,
    gather_sequence,
    join_features,
    scatter_sum,
    split_features,
)
from meshwright.spec.tensor_rules import COLUMNS, ROWS, TensorRules, degree_fault, sequence_fault, share

Move = Callable[[torch.Tensor], torch.Tensor]


def cut_tensors(model: nn.Module, rules: TensorRules, axis: TensorAxis, *, loss_parallel: bool) -> dict[str, Cut]:
    """Leave of every parameter this rank's part, and have the module compute what it computed whole.

    Works on the meta device too, where a part is an empty tensor of its shape. Ties are kept.

    Args:
        model: bare, before recompute and data parallelism; or the part of one that a pipeline stage has.
        rules: its table.
        axis: the ranks to cut over.
        loss_parallel: the head's logits stay cut, for `vocabulary_cross_entropy`; else they are joined.

    Returns:
        The cut of every parameter, by each of its bare names.

    Raises:
        LayoutError: whole heads do not divide over the ranks; it names the legal degrees.
        SpecError: a style does not fit its module, or tied parameters would be cut in two ways.
    """
    fault = degree_fault(rules, axis.size)
    if fault is not None:
        raise LayoutError(fault.where, fault.rule, fault.nearest)
    styled = find_styled(model, rules)
    require_sound(model, rules, styled)
    cuts = _cut_parameters(model, rules, axis)
    wrapping = _Wrapping(rules, axis, cuts, loss_parallel)
    wrapped: set[int] = set()
    for found in styled:
        if id(found.module) not in wrapped:  # a module that is shared has several names
            wrapped.add(id(found.module))
            wrapping.wrap(found)
    if may_draw(model):
        for module in _attentions(styled):
            _replace(module, partial(with_whole_masks, module, axis, module.forward))
    return cuts


def head_part(rules: TensorRules, cuts: dict[str, Cut], axis: TensorAxis) -> VocabularyPart | None:
    """Which logits a rank's head gives where they stay cut; None if no head is cut here.

    Args:
        rules: the model's table.
        cuts: what `cut_tensors` returned.
        axis: the ranks that it cut over.
    """
    for name, cut in cuts.items():
        style = rules.style_of(name.rpartition(".")[0])
        if style is not None and style.word == "head":
            return VocabularyPart(axis, cut.start, cut.stop, cut.shape[0])
    return None


def _cut_parameters(model: nn.Module, rules: TensorRules, axis: TensorAxis) -> dict[str, Cut]:
    """Put this rank's part in every parameter's place; a tied one gets one part."""
    cuts: dict[str, Cut] = {}
    places: list[tuple[nn.Module, str, str, nn.Parameter]] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.append((module, key, bare_name(f"{prefix}.{key}" if prefix else key), parameter))
    parts: dict[nn.Parameter, tuple[nn.Parameter, Cut]] = {}
    for module, key, name, parameter in places:
        cut = _cut_of(rules, name, parameter, axis)
        part, first = parts.setdefault(parameter, (_part(parameter, cut), cut))
        if cut != first:
            raise SpecError(
                f"layout.tensor: `{name}`", "shares its values with a parameter that is cut otherwise.",
                "Give a tied embedding and head `vocabulary` and `head`.",
            )  # fmt: skip
        module._parameters[key] = part
        cuts[name] = cut
    return cuts


def _cut_of(rules: TensorRules, name: str, parameter: nn.Parameter, axis: TensorAxis) -> Cut:
    has = share(rules, name, tuple(parameter.shape), axis.size, axis.rank)
    return Cut(
        shape=tuple(parameter.shape),
        dim=has.dim,
        start=has.start,
        stop=has.stop,
        copies=has.copies,
        partial=has.partial,
    )


def _part(parameter: nn.Parameter, cut: Cut) -> nn.Parameter:
    """This rank's part, in memory of its own; the whole one if nothing is cut."""
    if cut.dim is None:
        return parameter
    local = parameter.detach()[cut.index].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(local, parameter.requires_grad)


@final
class _Wrapping:
    """Wraps the forward functions of a model whose parameters have been cut."""

    def __init__(self, rules: TensorRules, axis: TensorAxis, cuts: dict[str, Cut], loss_parallel: bool) -> None:
        self.rules, self.axis, self.cuts, self.loss_parallel = rules, axis, cuts, loss_parallel
        self.sequence = rules.cuts_sequence
        self.enter: Move = partial(gather_sequence if self.sequence else enter, axis=axis)
        self.leave: Move = partial(scatter_sum if self.sequence else add_up, axis=axis)

    def wrap(self, found: Found) -> None:
        """Wrap one module by its style; styles that only say what its parameters are wrap nothing."""
        word, module = found.style.word, found.module
        if word == "gather":
            _before(module, self.enter)
        elif word in COLUMNS:
            self._columns(found)
        elif word in ROWS:
            _replace(module, partial(_row, module, self.leave))
            if word == "row-split":
                _before(module, partial(split_features, axis=self.axis))
        elif word == "vocabulary":
            self._embedding(found)
        elif word == "positions" and self.sequence:
            _before(module, partial(_own_places, self.axis))
        elif word == "sequence-dropout" and self.sequence:
            _replace(module, partial(drop_sequence, module, self.axis))
        elif word == "feature-dropout":
            cut = self.cuts[f"{found.columns_beside[0]}.weight"]
            _replace(module, partial(drop_features, module, cut.shape[0], cut.start))

    def _columns(self, found: Found) -> None:
        """Outputs are cut: the input must be whole, and its gradient the sum of what the parts say."""
        if not found.is_gathered:
            _before(found.module, self.enter)
        if found.style.word == "column-gather" or (found.style.word == "head" and not self.loss_parallel):
            width = self.cuts[f"{found.name}.weight"].shape[0]
            _after(found.module, partial(join_features, width=width, axis=self.axis))

    def _embedding(self, found: Found) -> None:
        cut, module = self.cuts[f"{found.name}.weight"], found.module
        assert isinstance(module, nn.Embedding)
        if module.padding_idx is not None:  # its row gets no gradient, on the rank that has it
            here = cut.start <= module.padding_idx < cut.stop
            module.padding_idx = module.padding_idx - cut.start if here else None
        _replace(module, partial(_look_up, module.forward, module, cut, self.leave))
        if self.sequence:
            _before(module, partial(_require_even, self.rules, self.axis))


def _attentions(styled: list[Found]) -> list[nn.Module]:
    """The modules around columns of whole heads, each once."""
    around = [found.around for found in styled if found.style.word == "column" and found.style.pieces is not None]
    return list({id(module): module for module in around}.values())


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module another forward function. Partials of bound methods: a deep copy takes their selves along."""
    module.forward = forward


def _before(module: nn.Module, move: Move) -> None:
    """Pass the first input through `move`."""
    _replace(module, partial(_moved_input, module.forward, move))


def _after(module: nn.Module, move: Move) -> None:
    """Pass the result through `move`."""
    _replace(module, partial(_moved_output, module.forward, move))


def _moved_input(forward: Callable[..., Any], move: Move, *args: Any, **kwargs: Any) -> Any:
    if args:
        return forward(move(args[0]), *args[1:], **kwargs)
    first = next(iter(kwargs))
    return forward(**(kwargs | {first: move(kwargs[first])}))


def _moved_output(forward: Callable[..., Any], move: Move, *args: Any, **kwargs: Any) -> Any:
    return move(forward(*args, **kwargs))


def _row(module: Any, leave: Move, x: torch.Tensor) -> torch.Tensor:
    """A linear layer over parts of its inputs: the bias is added once, to the sum."""
    out = leave(F.linear(x, module.weight))
    return out if module.bias is None else out + module.bias


def _look_up(
    forward: Callable[..., torch.Tensor], module: nn.Embedding, cut: Cut, leave: Move, ids: torch.Tensor
) -> torch.Tensor:
    """An embedding that has some of its rows: zero for the others, and the sum over the ranks."""
    if cut.start == cut.stop:  # nothing to look up, and yet part of the graph
        return leave(module.weight.new_zeros(*ids.shape, cut.shape[1]) + module.weight.sum())
    index, elsewhere = here_or_none(ids, cut.start, cut.stop, cut.shape[0])
    return leave(forward(index).masked_fill(elsewhere[..., None], 0.0))


def _own_places(axis: TensorAxis, places: torch.Tensor) -> torch.Tensor:
    """Of (..., s) places those of this rank's part of the sequence."""
    here = places.size(-1) // axis.size
    return places.narrow(-1, here * axis.rank, here)


def _require_even(rules: TensorRules, axis: TensorAxis, ids: torch.Tensor) -> torch.Tensor:
    fault = sequence_fault(rules, ids.size(-1), axis.size)
    if fault is not None:
        raise LayoutError(fault.where, fault.rule, fault.nearest)
    return ids
