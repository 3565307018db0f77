"""Tensor parallelism as a table: which parameter is cut along which dimension, and what a rank has of it.

One table serves the runner, which cuts modules by it, and the planner, which counts by it. A rule is a pattern of
module or parameter names (part by part, `*` for a part) with a style; the first match counts.

    column[:N]        a linear layer's outputs are cut: rows of the weight, and the bias; N: as so many whole heads
    column-gather     the same, and the outputs are joined again (for layers whose outputs are several things in one)
    row[:N]           a linear layer's inputs are cut: columns of the weight; the results are summed, the bias is whole
    row-split         the same for an input that every rank has whole
    vocabulary        an embedding's rows are cut
    head              the linear layer that makes logits: its rows are cut as the embedding's are
    positions         an embedding of places, whole; each rank looks up its part of the sequence
    partial           whole weights that work on a part of the sequence or of the heads: the gradient is an addend
    replicated        whole weights that do the same on every rank
    gather            a module (attention, feed-forward) whose first input is gathered along the sequence, once
    sequence-dropout  dropout on a part of the sequence
    feature-dropout   dropout on a part of the features, as between column and row

A table with `gather` cuts the residual stream along the sequence between these modules (sequence parallelism,
Korthikanti et al., arXiv 2205.05198, section 4.2.2); without it activations are whole there (Megatron-LM, arXiv
1909.08053, section 3). The module around a `column:N` is attention: inside it, dropout of weights is by heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from meshwright.errors import Fault
from meshwright.spec.nearest import around, closest, listed

COLUMNS: Final = ("column", "column-gather", "head")
ROWS: Final = ("row", "row-split")
WHOLE: Final = ("positions", "partial", "replicated")
AROUND: Final = ("gather", "sequence-dropout", "feature-dropout")
WORDS: Final = (*COLUMNS, *ROWS, "vocabulary", *WHOLE, *AROUND)
COUNTED: Final = ("column", "row")
"""Words that may say how many whole pieces there are."""


@dataclass(frozen=True, slots=True)
class Style:
    """What tensor parallelism does to a module.

    Attributes:
        word: one of WORDS.
        pieces: whole things (heads) along the cut dimension, which are never divided; None cuts anywhere.
    """

    word: str
    pieces: int | None = None

    def __str__(self) -> str:
        return self.word if self.pieces is None else f"{self.word}:{self.pieces}"


@dataclass(frozen=True, slots=True)
class TensorRules:
    """The table of one model.

    Attributes:
        rules: patterns with their styles; the first that matches a name counts.
    """

    rules: tuple[tuple[str, Style], ...]

    @property
    def cuts_sequence(self) -> bool:
        """Whether the residual stream is a part of the sequence."""
        return any(style.word == "gather" for _, style in self.rules)

    def style_of(self, name: str) -> Style | None:
        """The style of a module or parameter by its qualified name; None if no pattern matches."""
        return next((style for pattern, style in self.rules if matches(name, pattern)), None)

    def style_of_parameter(self, name: str) -> Style | None:
        """By the parameter's own name, else by its module's."""
        return self.style_of(name) or self.style_of(name.rpartition(".")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank has of a parameter.

    Attributes:
        dim: that is cut; None if every rank has all of it.
        start: first index along `dim`.
        stop: one past the last; `start` where a rank has none.
        copies: neighbouring ranks that have this same part: all of them where nothing is cut.
        partial: the gradient on this rank is one addend of a sum over those copies.
    """

    dim: int | None
    start: int
    stop: int
    copies: int
    partial: bool


def matches(name: str, pattern: str) -> bool:
    """Part by part, as in paths: `blocks.*.norm` is no norm deeper inside."""
    import fnmatch  # A recipe without tensor parallelism never asks.

    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def parse_style(text: str, where: str = "layout.tensor") -> Style | Fault:
    """Read `column`, `column:8` and the like; what is wrong with it comes back as a fault."""
    word, colon, number = text.partition(":")
    if word not in WORDS:
        near = closest(word, WORDS, 0.4)
        return Fault(where, f'"{text}" is not one of {", ".join(WORDS)}.', f'Nearest: "{near}".' if near else "")
    if not colon:
        return Style(word)
    if word not in COUNTED:
        return Fault(where, f'"{text}": only {listed(COUNTED, "and")} count whole pieces.', f'Nearest: "{word}".')
    if not number.isascii() or not number.isdigit() or int(number) < 1:
        return Fault(where, f'"{text}": the number of whole pieces must be at least 1.', f'Such as "{word}:8".')
    return Style(word, int(number))


def rules_of(table: Mapping[str, str]) -> TensorRules:
    """A sound `layout.tensor` as rules; the loader has refused wrong styles."""
    styles = ((pattern, parse_style(text)) for pattern, text in table.items())
    return TensorRules(tuple((pattern, style) for pattern, style in styles if isinstance(style, Style)))


def reference_rules(name: str, n_heads: int, n_kv_heads: int) -> TensorRules:
    """The table of a reference model.

    Args:
        name: llama | gpt2.
        n_heads: query heads.
        n_kv_heads: key and value heads.
    """
    attention = {
        "query": f"column:{n_heads}",
        "key": f"column:{n_kv_heads}",
        "value": f"column:{n_kv_heads}",
        "out": f"row:{n_heads}",
    }
    gate = {"feed_forward.gate": "column"} if name == "llama" else {}
    block = {
        "norm1": "partial",
        "norm2": "partial",
        "attention": "gather",
        **{f"attention.{part}": style for part, style in attention.items()},
        "feed_forward": "gather",
        **gate,
        "feed_forward.up": "column",
        "feed_forward.down": "row",
        "dropout": "sequence-dropout",
    }
    outside = {"embedding": "vocabulary", "norm": "partial", "head": "head"}
    if name == "gpt2":
        outside |= {"positions": "positions", "dropout": "sequence-dropout"}
    return rules_of(outside | {f"blocks.*.{part}": style for part, style in block.items()})


def share(rules: TensorRules, name: str, shape: tuple[int, ...], tp: int, rank: int = 0) -> Share:
    """What a rank has of a parameter; rank 0 has the most.

    Args:
        rules: the table.
        name: of the parameter.
        shape: of the whole parameter.
        tp: ranks over which matrices are cut, a legal degree.
        rank: 0 .. tp - 1.
    """
    style = rules.style_of_parameter(name) or Style("replicated")
    dim = _cut_dim(style.word, len(shape))
    if dim is not None:
        start, stop, copies = piece(shape[dim], style.pieces, tp, rank)
        return Share(dim=dim, start=start, stop=stop, copies=copies, partial=copies > 1)
    after_row = style.word in ROWS and rules.cuts_sequence  # its bias is added to a part of the sequence
    partial = style.word == "partial" or after_row or (style.word == "positions" and rules.cuts_sequence)
    return Share(dim=None, start=0, stop=0, copies=tp, partial=partial and tp > 1)


def local_elements(rules: TensorRules, name: str, shape: tuple[int, ...], tp: int) -> int:
    """The elements of a parameter that a rank has at most."""
    most = share(rules, name, shape, tp)
    product = 1
    for dim, size in enumerate(shape):
        product *= most.stop - most.start if dim == most.dim else size
    return product


def piece(size: int, pieces: int | None, tp: int, rank: int) -> tuple[int, int, int]:
    """Where a rank's part of `size` starts and stops, and how many neighbours have the same.

    Parts are those of torch.chunk: as large as the first, but for the last ranks, which may have less or none. Whole
    pieces fewer than ranks (key and value heads) are each had by tp / pieces neighbours.
    """
    if pieces is not None and pieces < tp:
        copies = tp // pieces
        width, place = size // pieces, rank // copies
        return place * width, (place + 1) * width, copies
    width = size // tp if pieces is not None else -(-size // tp)
    return min(rank * width, size), min((rank + 1) * width, size), 1


def degree_fault(rules: TensorRules, tp: int, limit: int | None = None) -> Fault | None:
    """Why a model cannot be cut over `tp` ranks; None if it can.

    Args:
        rules: its table.
        tp: the degree asked for.
        limit: the largest degree that is named as legal; twice `tp` if None.
    """
    broken = next((rule for rule in rules.rules if not _is_legal(rule[1], tp)), None)
    if broken is None:
        return None
    legal = legal_degrees(rules, limit or 2 * tp)
    pattern, style = broken
    if style.word == "row" or (style.pieces or 0) > tp:
        rule = f"is {tp}, and {pattern} has {style.pieces} heads: {tp} does not divide {style.pieces}."
    else:
        rule = f"is {tp}, and {pattern} has {style.pieces} heads: {style.pieces} does not divide {tp}."
    near = f"Legal: {listed(legal)}; nearest: {listed(around(tp, legal))}."
    return Fault("layout.tp", rule, near)


def legal_degrees(rules: TensorRules, limit: int) -> list[int]:
    """Every degree up to `limit` over which a model can be cut, ascending."""
    return [tp for tp in range(1, limit + 1) if all(_is_legal(style, tp) for _, style in rules.rules)]


def sequence_fault(rules: TensorRules, seq_len: int, tp: int) -> Fault | None:
    """Why sequences of this length cannot be cut over `tp` ranks; None if they can, or are not cut."""
    if not rules.cuts_sequence or seq_len % tp == 0:
        return None
    below = seq_len // tp * tp
    near = listed(length for length in (below, below + tp) if length)
    rule = f"is {seq_len}, and layout.tp = {tp} cuts every sequence: {seq_len} % {tp} = {seq_len % tp}."
    return Fault("data.seq_len", rule, f"Nearest: {near}.")


def empty_fault(rules: TensorRules, shapes: Mapping[str, tuple[int, ...]], tp: int) -> Fault | None:
    """The first parameter of which the last rank would have nothing; None if every rank has some of each.

    A part may be empty where nothing cuts it further. FSDP2 reduces no empty gradients (torch 2.13).

    Args:
        rules: the table.
        shapes: of the whole parameters, by name.
        tp: a legal degree.
    """
    name = _first_empty(rules, shapes, tp)
    if name is None:
        return None
    legal = [degree for degree in legal_degrees(rules, tp) if _first_empty(rules, shapes, degree) is None]
    rule = f"is {tp}, and {name} of shape {shapes[name]} in equal parts but the last ones leaves a rank with nothing."
    return Fault("layout.tp", rule, f"Legal under ZeRO: {listed(legal)}; nearest: {legal[-1]}.")


def _first_empty(rules: TensorRules, shapes: Mapping[str, tuple[int, ...]], tp: int) -> str | None:
    lasts = ((name, share(rules, name, shape, tp, tp - 1)) for name, shape in shapes.items())
    return next((name for name, last in lasts if last.dim is not None and last.start == last.stop), None)


def style_faults(table: Mapping[str, str]) -> Iterable[Fault]:
    """What is wrong with the styles of a `layout.tensor`."""
    read = (parse_style(text, f'layout.tensor."{pattern}"') for pattern, text in table.items())
    return [fault for fault in read if isinstance(fault, Fault)]


def _cut_dim(word: str, ndim: int) -> int | None:
    """The dimension of a parameter that a style cuts: a bias has one, and follows the outputs."""
    if word in COLUMNS or word == "vocabulary":
        return 0
    return 1 if word in ROWS and ndim > 1 else None


def _is_legal(style: Style, tp: int) -> bool:
    """Do whole pieces divide over the ranks? Those of columns may be shared by several ranks, those of rows not."""
    if style.pieces is None or style.pieces % tp == 0:
        return True
    return style.word == "column" and style.pieces < tp and tp % style.pieces == 0
