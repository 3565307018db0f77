"""Which modules a table of tensor parallelism means, and whether each can be cut so."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn as nn
from torch.nn.modules.dropout import _DropoutNd

from meshwright.errors import SpecError
from meshwright.models.anatomy import bare_name
from meshwright.spec.nearest import closest, first_of
from meshwright.spec.tensor_rules import COLUMNS, ROWS, Style, TensorRules, matches

NEEDS: dict[str, type[nn.Module]] = {
    **dict.fromkeys((*COLUMNS, *ROWS), nn.Linear),
    **dict.fromkeys(("vocabulary", "positions"), nn.Embedding),
    **dict.fromkeys(("sequence-dropout", "feature-dropout"), nn.Dropout),
}
"""Styles that change what a module computes, and the kind of module that they know."""
LAYERS = (nn.Linear, nn.Embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A module with its style.

    Attributes:
        name: qualified.
        module: itself.
        style: the table's.
        around: the module that it is a part of.
        is_gathered: it lies inside a module whose input is gathered.
        columns_beside: names of the modules beside it whose outputs are cut.
    """

    name: str
    module: nn.Module
    style: Style
    around: nn.Module
    is_gathered: bool
    columns_beside: tuple[str, ...]


def find_styled(model: nn.Module, rules: TensorRules) -> list[Found]:
    """Every module that the table names, in the model's order, under each of its names."""
    named = [(bare_name(name), module) for name, module in model.named_modules(remove_duplicate=False)]
    modules = dict(named)
    styles = {name: style for name, _ in named if name and (style := rules.style_of(name)) is not None}
    gathers = tuple(f"{name}." for name, style in styles.items() if style.word == "gather")
    columns = [name for name, style in styles.items() if style.word == "column"]
    return [
        Found(
            name=name,
            module=module,
            style=styles[name],
            around=modules[name.rpartition(".")[0]],
            is_gathered=name.startswith(gathers),
            columns_beside=tuple(other for other in columns if other.rpartition(".")[0] == name.rpartition(".")[0]),
        )
        for name, module in named
        if name in styles
    ]


def require_matches(model: nn.Module, rules: TensorRules) -> None:
    """Refuse a pattern that means nothing in a whole model (a pipeline stage has only a part of the names).

    Raises:
        SpecError: it names the nearest.
    """
    names = [bare_name(name) for name, _ in model.named_modules(remove_duplicate=False) if name]
    names += [bare_name(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern, _ in rules.rules:
        if not any(matches(name, pattern) for name in names):
            near = closest(pattern, names, 0.4)
            rule = f"matches no module or parameter; their names are {first_of(names)}."
            raise SpecError(f'layout.tensor."{pattern}"', rule, f"Nearest: {near!r}." if near else "")


def require_sound(model: nn.Module, rules: TensorRules, styled: list[Found]) -> None:
    """Refuse styles that do not fit their modules, and parameters that the table forgets.

    Raises:
        SpecError: it names the module or parameter.
    """
    for found in styled:
        _require_kind(found)
    names = [bare_name(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    layers = {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, LAYERS)}
    for name in names:
        _require_bare(name, rules.style_of(name), name.rpartition(".")[0] in layers)
    forgotten = [name for name in names if rules.style_of_parameter(name) is None]
    if rules.cuts_sequence and forgotten:
        rule = f"says nothing of {first_of(forgotten)}; where the sequence is cut, every parameter needs a style."
        raise SpecError("layout.tensor", rule, "`partial` is for whole weights on a part of the sequence or heads.")
    _require_named_beside(forgotten, styled)
    _require_dropout_named(model, rules, styled)


def _require_dropout_named(model: nn.Module, rules: TensorRules, styled: list[Found]) -> None:
    """Refuse dropout without a style where it may see a part: ranks draw alike, so parts would be dropped alike.

    Attention's own, over weights of heads (b, h, s, s), is known by its shape and needs no style.
    """
    columns = [found for found in styled if found.style.word == "column"]
    beside = {id(found.around) for found in columns if found.style.pieces is None}
    attention = {id(found.around) for found in columns if found.style.pieces is not None}
    for prefix, around in model.named_modules():
        for key, module in around.named_children():
            name = bare_name(f"{prefix}.{key}" if prefix else key)
            if not isinstance(module, _DropoutNd) or module.p == 0.0 or rules.style_of(name) is not None:
                continue
            if id(around) in beside or (rules.cuts_sequence and id(around) not in attention):
                rule = "says nothing of this dropout, which may see a part of the features or of the sequence."
                near = "`feature-dropout` between column and row, `sequence-dropout` behind it, `replicated` elsewhere."
                raise SpecError(f"layout.tensor: `{name}`", rule, near)


def _require_named_beside(forgotten: list[str], styled: list[Found]) -> None:
    """Refuse parameters without a style in a module whose columns give it a part of their outputs.

    A norm of each head or a scale of features sees a part on each rank there, and its gradients are addends; a norm of
    the columns' input sees all of it. Only the table can tell, and a wrong guess trains wrongly without a sign.
    """
    modules = {found.name.rpartition(".")[0] for found in styled if found.style.word == "column"}
    inside = tuple(f"{name}." if name else "" for name in modules)
    doubtful = [name for name in forgotten if name.startswith(inside)]
    if doubtful:
        rule = f"says nothing of {first_of(doubtful)}, which may act on what a `column` in the same module cuts."
        raise SpecError("layout.tensor", rule, "`partial` is for whole weights on parts; `replicated` on the whole.")


def _require_bare(name: str, style: Style | None, is_of_layer: bool) -> None:
    """A style given to a parameter says what it is; one that changes how its layer computes must name the layer."""
    legal = ("partial", "replicated") if is_of_layer else ("column", "partial", "replicated")
    if style is not None and style.word not in legal:
        rule = f"is a parameter, and `{style.word}` changes what a module computes."
        raise SpecError(f"layout.tensor: `{name}`", rule, f"Name its module: {name.rpartition('.')[0]!r}.")


def _require_kind(found: Found) -> None:
    """Styles rewrite how a layer computes, so they must know it."""
    word, module = found.style.word, found.module
    kind, asked = NEEDS.get(word), f'layout.tensor: `{found.name}` = "{found.style}"'
    if kind is None:
        return
    if not isinstance(module, kind) or (kind is nn.Linear and type(module).forward is not nn.Linear.forward):
        raise SpecError(asked, f"is a {type(module).__name__}; `{word}` is for torch.nn.{kind.__name__}.")
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        rule = "has max_norm, scale_grad_by_freq or sparse, which need whole rows and whole counts."
        raise SpecError(asked, rule, 'Nearest: "replicated".')
    pieces, size = found.style.pieces, _cut_size(module, word)
    if pieces is not None and size % pieces:
        raise SpecError(asked, f"cuts {size} rows or columns as {pieces} whole heads: {size} % {pieces} is not 0.")
    if word == "feature-dropout" and not found.columns_beside:
        raise SpecError(asked, "has no `column` beside it that would say how many features there are.")


def _cut_size(module: nn.Module, word: str) -> int:
    """How many rows or columns a style cuts; 1 where it cuts none."""
    if not isinstance(module, nn.Linear):
        return 1
    return module.in_features if word in ROWS else module.out_features
