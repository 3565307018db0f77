"""Tracing any module: what lives without memory is, to the byte, what lives with it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.errors import SpecError
from meshwright.models.trace_memory import LiveBytes
from meshwright.spec.model_spec import ModelSpec
from models.traced import (
    CASES,
    SEQ,
    VOCAB,
    Case,
    Classifier,
    at,
    decoder,
    kept_bytes,
    saved_by_autograd,
    squared,
    traced,
    vectors,
)
from models.traced import tokens as token_rows


def without_source(spec: ModelSpec) -> ModelSpec:
    return replace(spec, source="")


HALF = [
    ("gpt2", "bf16"),
    *(
        pytest.param(name, "bf16", marks=pytest.mark.matrix)
        for name in ("llama", "tied and frozen", "encoder of torch.nn")
    ),
]
"""Not the convolutions: torch's shapes have a batch norm's statistics in bf16, where a CPU has fp32."""


@pytest.mark.parametrize(("name", "compute"), [*((name, "fp32") for name in CASES), *HALF, ("llama", "fp64")])
def test_a_trace_without_memory_equals_one_of_real_tensors_to_the_byte(name, compute) -> None:
    without, real = traced(name, compute), CASES[name]().trace(compute, real=True)
    assert "fake tensors" in without.source and "real tensors" in real.source
    assert without_source(without) == without_source(real)


@pytest.mark.parametrize("name", CASES)
def test_the_parts_add_up_to_what_autograd_saves_in_the_users_own_module(name) -> None:
    case, size = CASES[name](), 5  # a size that was not traced
    total_and_count = 8 if case.loss is not squared else 4  # live too: the sum itself, and the loss's count of labels
    expected = saved_by_autograd(case, size) + total_and_count
    assert kept_bytes(traced(name), size * case.seq_len) == pytest.approx(expected, abs=8)


@pytest.mark.parametrize("name", ["gpt2", "encoder of torch.nn", "convolutions"])
def test_two_sizes_foretell_a_third(name) -> None:
    case = CASES[name]()
    lines, larger = traced(name), case.trace(real=True, microbatches=(6, 7))
    for tokens in (6 * case.seq_len, 7 * case.seq_len):
        assert kept_bytes(lines, tokens) == pytest.approx(kept_bytes(larger, tokens), rel=1e-12)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_a_recompute_mode_keeps_is_what_lives_in_a_real_run_of_it(name, mode) -> None:
    from meshwright.parallel.recompute import apply_recompute

    case, size = decoder(name), 2
    spec = case.trace(real=True)
    apply_recompute(case.model, mode)
    batch = case.batch_of(size)
    lives = LiveBytes([*case.model.parameters(), *batch.values()])
    with lives:
        kept = case.loss(case.model, batch)  # the sum, and the count: 8 bytes that a trace lets go
        alive = sum(life.nbytes for life in lives.living()) + sum(t.untyped_storage().nbytes() for t in batch.values())
    assert len(kept) == 2 and kept_bytes(spec, size * SEQ, mode) == alive - 8


def test_the_loss_peak_is_that_of_a_real_run_where_logits_are_the_most() -> None:
    case, size = decoder("llama", vocab_size=4001, n_layers=2), 2
    spec, tokens = case.trace(real=True), size * SEQ
    batch = case.batch_of(size)
    lives = LiveBytes([*case.model.parameters(), *batch.values()])
    with lives:
        total = case.loss(case.model, batch)[0]
        begin = lives.now
        total.backward()
    gradients = lives.lives_of([parameter.grad for parameter in case.model.parameters()])
    foretold = kept_bytes(spec, tokens) - at(spec.loss_kept, tokens) + at(spec.loss_peak, tokens)
    measured = lives.peak(begin, without=gradients) + sum(t.untyped_storage().nbytes() for t in batch.values())
    assert foretold == pytest.approx(measured, abs=16)  # the sum and the count, which this loop holds or lets go


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_blocks_backward_peak_is_that_of_a_real_run_of_blocks_alone(name) -> None:
    case, size = decoder(name, vocab_size=5, n_layers=4, d_ff=200, tied_embeddings=False), 8
    case = replace(case, batch_of=lambda n: {key: rows % 5 for key, rows in token_rows(n).items()})
    spec, tokens = case.trace(real=True), size * SEQ
    batch = case.batch_of(size)
    lives = LiveBytes([*case.model.parameters(), *batch.values()])
    with lives:
        total = case.loss(case.model, batch)[0]
        begin = lives.now
        total.backward()
    gradients = lives.lives_of([parameter.grad for parameter in case.model.parameters()])
    measured = lives.peak(begin, without=gradients) + sum(t.untyped_storage().nbytes() for t in batch.values())
    (unit,) = spec.units
    foretold = at(spec.before, tokens) + 4 * at(unit.saved["none"], tokens) + at(unit.backward_peak, tokens)
    assert foretold == pytest.approx(measured, abs=16)  # as above


def test_the_module_is_not_touched() -> None:
    case = decoder("gpt2", dropout=0.1)
    before = copy.deepcopy(case.model.state_dict())
    case.trace(), case.trace("bf16", "cuda"), case.trace("bf16", real=True)
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    for module in case.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and "forward" not in vars(module)
    assert all(p.grad is None and p.dtype == torch.float32 for p in case.model.parameters())


def test_meta_parameters_are_enough() -> None:
    case = decoder("llama")
    on_meta = replace(case, model=copy.deepcopy(case.model).to("meta"))
    for kernels in ("cpu", "cuda"):
        assert on_meta.trace(kernels=kernels) == case.trace(kernels=kernels)


def test_parameters_are_counted_by_part_and_ties_once() -> None:
    spec = traced("tied and frozen")
    frozen, trained = spec.units
    assert frozen.frozen == frozen.parameters and trained.frozen == 0
    assert spec.embedding_parameters == VOCAB * 24 and spec.head_parameters == 0 and spec.tied
    assert spec.other_parameters == 24 and spec.root_frozen == VOCAB * 24
    untied = traced("llama")
    assert untied.head_parameters == VOCAB * 24 and not untied.tied
    assert untied.num_parameters == sum(p.numel() for p in decoder("llama").model.parameters())
    assert untied.units[0].largest == 24 * 56


def test_a_block_that_gets_and_gives_no_gradient_keeps_nothing() -> None:
    case = decoder("gpt2", tied_embeddings=False, n_layers=3)
    for part in (case.model.embedding, case.model.positions, case.model.blocks[0]):
        part.requires_grad_(False)
    frozen, *trained = case.trace(real=True).units
    assert at(frozen.saved["none"], 100) == 0
    assert [unit.count for unit in trained] == [2]


def test_a_parameter_that_blocks_share_belongs_to_none_of_them() -> None:
    case = decoder("llama")
    for block in case.model.blocks[1:]:
        block.feed_forward.up.weight = case.model.blocks[0].feed_forward.up.weight
    spec = case.trace(real=True)
    assert spec.num_parameters == sum(p.numel() for p in case.model.parameters())
    assert spec.other_parameters == 24 + 24 * 56


def test_equal_blocks_are_one_run_and_others_are_apart() -> None:
    case = decoder("gpt2", dropout=0.1, n_layers=5)
    case.model.blocks[2].dropout.p = case.model.blocks[3].dropout.p = 0.0
    assert [(unit.name, unit.count) for unit in case.trace(real=True).units] == [
        ("Block", 2),
        ("Block", 2),
        ("Block", 1),
    ]
    assert [unit.count for unit in traced("convolutions").units] == [
        1,
        1,
        3,
    ]  # the second has the convolution behind it


def test_arithmetic_is_counted() -> None:
    for spec in (traced("llama"), traced("llama", "bf16"), decoder("llama").trace("fp32", "cuda")):
        (unit,) = spec.units
        assert unit.matmul_parameters == 2 * 24 * 24 + 2 * 24 * 8 + 3 * 24 * 56
        assert unit.attention_width == 24


def test_bare_layers_are_blocks_that_are_not_recomputed() -> None:
    assert [(unit.name, set(unit.saved)) for unit in traced("bare layers").units] == [("Linear", {"none"})] * 3


def test_a_model_without_blocks_is_loss_all_over() -> None:
    case, spec = CASES["without blocks"](), traced("without blocks")
    assert spec.units == () and spec.num_parameters == sum(p.numel() for p in case.model.parameters())
    assert at(spec.before, 4) == 4 * 10 * 4 and at(spec.loss_kept, 4) > 0


class Peeking(nn.Module):
    """Looks at the values of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Classifier(0.0).encoder.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if x.abs().sum().item() > 0 else x
        return x


@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
def test_a_module_that_looks_at_values_is_traced_on_real_tensors_and_that_is_said(kernels) -> None:
    case = Case(Peeking(), squared, vectors(9, 16), 9)
    spec = case.trace(kernels=kernels)
    assert "real tensors" in spec.source and spec.n_layers == 2
    with pytest.raises(SpecError, match=r"tracing the model Peeking: its loss failed on a batch of 2"):
        replace(case, model=case.model.to("meta")).trace(kernels=kernels)


def test_a_loss_that_fails_is_one_line() -> None:
    def wrong(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        raise ValueError("no such column")

    with pytest.raises(SpecError, match=r"failed on a batch of 2: ValueError: no such column \(.*test_trace.py:\d+\)"):
        replace(decoder("llama"), loss=wrong).trace()


def test_every_form_of_loss_is_understood() -> None:
    def pairs(model, batch):
        total, count = decoder_loss(model, batch)
        return [(total, count), (0.1 * total, count)]

    case = decoder("llama")
    decoder_loss = case.loss
    mean = replace(case, loss=lambda model, batch: decoder_loss(model, batch)[0] / 7)
    assert mean.trace().units == traced("llama").units == replace(case, loss=pairs).trace().units


def test_tensors_that_are_neither_parameters_nor_buffers_are_moved_too() -> None:
    class Holding(Classifier):
        def __init__(self) -> None:
            super().__init__(0.0)
            self.scales = {"in": [torch.linspace(1, 2, 16)]}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.scales["in"][0])

    case = Case(Holding(), squared, vectors(9, 16), 9)
    assert all("real" not in case.trace(kernels=kernels).source for kernels in ("cpu", "cuda"))


def test_blocks_that_recompute_by_themselves_keep_their_input_alone() -> None:
    from torch.utils.checkpoint import checkpoint

    class Thrifty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Classifier(0.0).encoder.layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    for kernels in ("cpu", "cuda"):
        spec = Case(Thrifty(), squared, vectors(9, 16), 9).trace(kernels=kernels)
        assert at(spec.units[-1].saved["full"], 18) == 18 * 16 * 4
        assert kept_bytes(spec, 18) < 5 * 18 * 16 * 4


def test_a_long_trace_stays_linear_in_the_number_of_blocks() -> None:
    short, long = (decoder("llama", n_layers=n).trace(kernels="cuda") for n in (2, 9))
    assert short.units[0].saved == long.units[0].saved and long.units[0].count == 9
    assert (short.before, short.after, short.loss_peak) == (long.before, long.after, long.loss_peak)


def test_rows_of_any_container_are_moved() -> None:
    case = decoder("llama")
    plain = token_rows

    def loss(model, batch):
        (rows, labels), _ = batch
        return case.loss(model, {"tokens": rows, "labels": labels})

    boxed = replace(case, loss=loss, batch_of=lambda n: [tuple(plain(n).values()), "a remark"])
    assert boxed.trace().units == traced("llama").units
