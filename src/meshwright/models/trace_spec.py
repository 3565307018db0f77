"""What two passes of a trace say, as a ModelSpec: parameters by part, and the line through two microbatch sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch.nn as nn

from meshwright.models.anatomy import Named, parameters_in_order, repeated_blocks
from meshwright.models.trace_pass import BlockPass, Passed
from meshwright.models.trace_unit import Measured
from meshwright.spec.model_spec import Bytes, ModelSpec, UnitSpec


@dataclass(frozen=True, slots=True)
class Traced:
    """Two passes.

    Attributes:
        microbatches: samples of each.
        passes: what each kept and needed.
        measured: for each, blocks by themselves, by index and recompute mode.
    """

    microbatches: tuple[int, int]
    passes: tuple[Passed, Passed]
    measured: tuple[Mapping[int, dict[str, Measured]], Mapping[int, dict[str, Measured]]]


def assemble(model: nn.Module, traced: Traced, *, name: str, seq_len: int, compute: str, source: str) -> ModelSpec:
    """Make the description of a traced model; arguments as of `trace_module`."""
    small, large = traced.passes
    blocks = repeated_blocks(model)
    lines, shared = Lines(traced.microbatches, seq_len), _shared(model, blocks)
    runs = _runs([block for _, block in blocks], small)
    return ModelSpec(
        name=name,
        units=tuple(_unit(blocks[run[0]][1], run, kind, traced, lines, shared) for run, kind in runs),
        **_parts(model, blocks, shared, small.widths[1]),
        buffers=sum(b.numel() * _master_bytes(b, compute) for b in model.buffers()),
        before=lines(small.before, large.before),
        after=lines(small.after, large.after),
        loss_kept=lines(small.loss_kept, large.loss_kept),
        loss_forward=lines(small.loss_forward, large.loss_forward),
        loss_peak=lines(small.loss_peak, large.loss_peak),
        d_model=small.widths[0],
        vocab_size=small.widths[1],
        seq_len=seq_len,
        compute=compute,
        source=source,
        architecture={"class": type(model).__name__, "block": type(blocks[0][1]).__name__ if blocks else None},
    )


def shapes_of(block: nn.Module) -> tuple[Any, ...]:
    """What blocks of one kind have in common, whatever they keep."""
    return type(block), tuple((tuple(p.shape), p.requires_grad) for p in block.parameters())


def kinds_of(blocks: Sequence[nn.Module], passed: Passed) -> list[list[int]]:
    """Indices of equal blocks: of the same class, with the same parameters, that keep as much."""
    kinds: dict[Any, list[int]] = {}
    for index, block in enumerate(blocks):
        kinds.setdefault((shapes_of(block), passed.blocks[index]), []).append(index)
    return list(kinds.values())


def _runs(blocks: Sequence[nn.Module], passed: Passed) -> list[tuple[list[int], int]]:
    """Equal blocks that follow one another, each run with the first block of its kind, which was measured."""
    kind_of = {index: kind[0] for kind in kinds_of(blocks, passed) for index in kind}
    runs: list[tuple[list[int], int]] = []
    for index in range(len(blocks)):
        if runs and runs[-1][1] == kind_of[index]:
            runs[-1][0].append(index)
        else:
            runs.append(([index], kind_of[index]))
    return runs


@final
class Lines:
    """Bytes at two microbatch sizes as a line over tokens."""

    def __init__(self, microbatches: tuple[int, int], seq_len: int) -> None:
        self.microbatches, self.seq_len = microbatches, seq_len

    def __call__(self, small: float, large: float) -> Bytes:
        """The line through both; where it would fall, or begin below 0, one that is above both."""
        a, b = self.microbatches
        slope = (large - small) / (b - a)
        fixed = small - a * slope
        if slope < 0:
            slope, fixed = 0.0, small
        elif fixed < 0:  # a maximum of several lines bends upward
            slope, fixed = large / b, 0.0
        return Bytes(fixed=fixed, residual=slope / self.seq_len)


def _shared(model: nn.Module, blocks: Named) -> set[int]:
    """Parameters of blocks that other modules hold too: they stay with the rest of the model, once."""
    home = {id(module): index for index, (_, block) in enumerate(blocks) for module in block.modules()}
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), set()).add(home.get(id(module), -1))
    return {parameter for parameter, places in holders.items() if len(places) > 1}


def _unit(
    block: nn.Module, run: list[int], kind: int, traced: Traced, lines: Lines, shared: Collection[int]
) -> UnitSpec:
    """A run of equal blocks."""
    both = [(p.blocks[kind], m.get(kind, {})) for p, m in zip(traced.passes, traced.measured, strict=True)]
    saved = {"none": lines(*(one.kept for one, _ in both))}
    for mode in both[0][1].keys() - {"none"}:
        saved[mode] = lines(*(one.inputs + one.calls * found[mode].kept for one, found in both))
    tokens = traced.microbatches[0] * lines.seq_len
    none, calls = both[0][1].get("none"), both[0][0].calls
    own = [p for p in block.parameters() if id(p) not in shared]
    return UnitSpec(
        name=type(block).__name__,
        count=len(run),
        parameters=sum(p.numel() for p in own),
        frozen=sum(p.numel() for p in own if not p.requires_grad),
        largest=max((p.numel() for p in own), default=0),
        saved={mode: saved[mode] for mode in ("none", "selective", "full") if mode in saved},
        transient=lines(*(found["full"].forward_peak if "full" in found else 0 for _, found in both)),
        forward_peak=lines(*(_beyond(one, found, forward=True) for one, found in both)),
        backward_peak=lines(*(_beyond(one, found, forward=False) for one, found in both)),
        recomputed_peak={
            mode: lines(*(max(found[mode].backward_peak - found[mode].kept, 0) for _, found in both))
            for mode in saved.keys() - {"none"}
        },
        parted_kept=lines(*(one.calls * found["none"].parted_kept if found else 0 for one, found in both)),
        parted_peak=lines(*(_beyond_parted(one, found) for one, found in both)),
        matmul_parameters=round(calls * none.matmul_flops / (2 * tokens)) if none else 0,
        attention_width=round(calls * none.attention_flops / (4 * tokens * lines.seq_len)) if none else 0,
    )


def _beyond(one: BlockPass, found: Mapping[str, Measured], *, forward: bool) -> float:
    """The most that lives at once in a call, beyond what the block keeps."""
    if "none" not in found:
        return 0.0
    inputs, none = one.inputs if forward else one.kept_input, found["none"]
    peak = none.forward_peak if forward else none.backward_peak
    return max(peak + (inputs - one.kept) / one.calls, 0.0)


def _beyond_parted(one: BlockPass, found: Mapping[str, Measured]) -> float:
    """The same of the backward pass of inputs, where there is one; before it the other calls' gradients are kept."""
    if "none" not in found or not found["none"].parted_peak:
        return 0.0
    none = found["none"]
    return max(none.parted_peak + (one.kept_input - one.kept) / one.calls + (one.calls - 1) * none.parted_kept, 0.0)


def _parts(model: nn.Module, blocks: Named, shared: Collection[int], vocab_size: int) -> dict[str, Any]:
    """Parameters of what is in no block."""
    inside = {id(p) for _, block in blocks for p in block.parameters()} - set(shared)
    root = [p for _, p in parameters_in_order(model) if id(p) not in inside]
    held = {id(p): p for p in root}
    embedding, head = _embedding(model, held), _head(model, held, vocab_size)
    is_tied = embedding is not None and head is not None and head.weight is embedding.weight
    sizes = [0, 0]
    for place, module in enumerate((embedding, None if is_tied else head)):
        sizes[place] = sum(p.numel() for p in module.parameters() if id(p) in held) if module is not None else 0
    return {
        "embedding_parameters": sizes[0],
        "head_parameters": sizes[1],
        "other_parameters": sum(p.numel() for p in root) - sum(sizes),
        "root_frozen": sum(p.numel() for p in root if not p.requires_grad),
        "tied": is_tied,
    }


def _embedding(model: Any, held: Mapping[int, nn.Parameter]) -> Any:
    """The token embedding: the largest of all embeddings."""
    found = [m for m in model.modules() if isinstance(m, nn.Embedding) and id(m.weight) in held]
    return max(found, key=lambda module: module.weight.numel(), default=None)


def _head(model: Any, held: Mapping[int, nn.Parameter], vocab_size: int) -> Any:
    """The last linear layer outside the blocks that is as wide as the model's result."""
    found = [m for m in model.modules() if isinstance(m, nn.Linear) and id(m.weight) in held]
    return next((module for module in reversed(found) if module.out_features == vocab_size), None)


def _master_bytes(buffer: Any, compute: str) -> int:
    """Bytes of one number of a buffer, as a run has it."""
    floating = 8 if compute == "fp64" else 4
    return floating if buffer.is_floating_point() else int(buffer.element_size())
