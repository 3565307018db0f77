"""What tensor parallelism refuses, and what it does without ranks: parts on the meta device, ties, masks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.errors import LayoutError, SpecError
from meshwright.models.build import build_reference
from meshwright.models.gpt2 import Gpt2
from meshwright.models.hf_tensor import hf_rules
from meshwright.models.llama import Llama
from meshwright.parallel.masks import part_dropout, plain_attention
from meshwright.parallel.tensor import cut_tensors, head_part
from meshwright.parallel.tensor_check import require_matches
from meshwright.parallel.tensor_moves import TensorAxis
from meshwright.spec.tensor_rules import reference_rules, rules_of
from models.tiny_hf import CONFIGS
from parallel.tensor_runs import VOCAB, rules_for, shape_of


def axis(rank: int, size: int) -> TensorAxis:
    """Ranks that never say a word."""
    return TensorAxis(rank, size, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("llama", True), ("gpt2", True)])
def test_parts_put_together_are_the_whole_on_any_device(name, tied, tp) -> None:
    shape = shape_of(name, tied=tied)
    whole, rules = build_reference(shape, 0), rules_for(shape)
    covered = {key: torch.zeros(p.shape) for key, p in whole.named_parameters()}
    for rank in range(tp):
        local = build_reference(shape, 0)
        cuts = cut_tensors(local, rules, axis(rank, tp), loss_parallel=True)
        assert set(cuts) == {key for key, _ in whole.named_parameters(remove_duplicate=False)}
        for key, parameter in local.named_parameters():
            cut = cuts[key]
            assert torch.equal(parameter, whole.get_parameter(key)[cut.index]) and parameter.is_contiguous()
            assert tuple(parameter.shape) == cut.local_shape
            covered[key][cut.index] += 1 / cut.copies
        with torch.device("meta"):
            empty = Gpt2(shape) if name == "gpt2" else Llama(shape)
        assert cut_tensors(empty, rules, axis(rank, tp), loss_parallel=True) == cuts
        shapes = {key: p.shape for key, p in local.named_parameters()}
        assert {key: p.shape for key, p in empty.named_parameters()} == shapes
        assert all(p.is_meta for p in empty.parameters())
        assert (local.head.weight is local.embedding.weight) == tied == (empty.head.weight is empty.embedding.weight)
        part = head_part(rules, cuts, axis(rank, tp))
        assert part is not None and (part.stop - part.start, part.size) == (len(local.head.weight), VOCAB)
    assert all(torch.equal(times, torch.ones_like(times)) for times in covered.values())


def test_a_deep_copy_of_a_cut_model_is_a_model_of_its_own() -> None:
    shape = shape_of("gpt2", tied=True)
    local = build_reference(shape, 0)
    cut_tensors(local, rules_for(shape), axis(1, 2), loss_parallel=True)
    other = copy.deepcopy(local)
    down = other.blocks[0].feed_forward.down
    assert down.forward.args[0] is down


class Packed(nn.Module):
    """What a user may give."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(10, 8, max_norm=1.0), nn.Linear(8, 6), nn.Linear(6, 8)
        self.again = nn.Linear(8, 10, bias=False)
        self.again.weight = self.words.weight
        self.act, self.dropout = nn.GELU(), nn.Dropout(0.1)


@pytest.mark.parametrize(
    ("table", "fragments"),
    [
        ({"act": "column"}, ["`act`", "is a GELU", "torch.nn.Linear"]),
        ({"up": "vocabulary"}, ["is a Linear; `vocabulary` is for torch.nn.Embedding"]),
        ({"up": "feature-dropout"}, ["is a Linear; `feature-dropout` is for torch.nn.Dropout"]),
        ({"words": "vocabulary"}, ["max_norm"]),
        ({"again": "head"}, ["shares its values", "`vocabulary` and `head`"]),
        ({"dropout": "feature-dropout"}, ["no `column` beside it"]),
        ({"up": "column:4"}, ["6 rows or columns as 4 whole heads: 6 % 4"]),
        ({"up.weight": "column"}, ["`up.weight`", "is a parameter", "Name its module: 'up'"]),
        ({"up.bias": "row"}, ["is a parameter"]),
        (
            {"up": "column", "down": "row"},
            ["says nothing of words.weight", "in the same module", "`partial`", "`replicated`"],
        ),
        ({"up": "gather", "down": "row"}, ["says nothing of words.weight", "every parameter needs a style"]),
    ],
)
def test_a_style_that_does_not_fit_is_refused(table, fragments) -> None:
    with pytest.raises(SpecError) as caught:
        cut_tensors(Packed(), rules_of(table), axis(0, 2), loss_parallel=True)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


WORDS = {"words": "replicated", "again": "replicated"}
BRANCH = {"up": "column", "down": "row", "act": "replicated"}


class Branch(nn.Module):
    """A block with dropout of its own, whose attention has some too."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.branch, self.norm, self.dropout = Packed(), nn.LayerNorm(8), nn.Dropout2d(p)
        self.branch.again, self.branch.words, self.branch.dropout = nn.Linear(8, 10), nn.Embedding(10, 8), nn.Dropout(p)
        self.attention = nn.ModuleDict({"query": nn.Linear(8, 8), "out": nn.Linear(8, 8), "dropout": nn.Dropout(p)})


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("named", ["nothing", "branch", "all"])
def test_dropout_that_may_see_a_part_needs_a_style(sequence, named) -> None:
    table = {f"branch.{name}": style for name, style in (WORDS | BRANCH).items()}
    table |= {"attention.query": "column:4", "attention.out": "row:4", "norm": "partial"}
    table |= {"branch": "gather", "attention": "gather"} if sequence else {}
    table |= {} if named == "nothing" else {"branch.dropout": "feature-dropout"}
    table |= {"dropout": "sequence-dropout" if sequence else "replicated"} if named == "all" else {}
    for p in (0.1, 0.0):
        model = Branch(p)
        model.dropout = nn.Dropout(p) if named == "all" else model.dropout  # what sequence-dropout knows
        refused = (
            r"`(branch\.)?dropout`" if named == "nothing" else "`dropout`" if sequence and named == "branch" else ""
        )
        if p and refused:
            with pytest.raises(SpecError, match=refused + r".*(feature-dropout|sequence-dropout)"):
                cut_tensors(model, rules_of(table), axis(0, 2), loss_parallel=True)
        else:
            cut_tensors(model, rules_of(table), axis(0, 2), loss_parallel=True)


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest() -> None:
    require_matches(Packed(), rules_of({"up": "column", "down.weight": "partial"}))
    with pytest.raises(SpecError, match=r"matches no module or parameter.*Nearest: 'down'"):
        require_matches(Packed(), rules_of({"downs": "row"}))


def test_an_illegal_degree_is_refused_with_the_legal_ones() -> None:
    shape = shape_of("llama", tied=False)
    with pytest.raises(LayoutError, match=r"3 does not divide 8\. Legal: 1, 2 or 4; nearest: 2 or 4\."):
        cut_tensors(build_reference(shape, 0), rules_for(shape), axis(0, 3), loss_parallel=True)


def test_a_sequence_that_does_not_divide_is_refused_when_it_comes() -> None:
    shape = shape_of("llama", tied=False)
    local = build_reference(shape, 0)
    cut_tensors(local, reference_rules("llama", 8, 2), axis(0, 4), loss_parallel=True)
    with pytest.raises(LayoutError, match=r"10 % 4 = 2\. Nearest: 8 or 12\."):
        local(torch.zeros(1, 10, dtype=torch.int64))


def hf(name):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name]))


def test_a_hugging_face_model_without_a_plan_is_refused() -> None:
    with pytest.raises(SpecError, match=r"carries no plan .*layout.tensor"):
        hf_rules(hf("gpt2"))


def test_a_word_of_a_plan_that_is_not_known_is_named() -> None:
    with pytest.raises(SpecError, match="moe_tp_experts, packed_colwise, which are not supported"):
        hf_rules(hf("mixtral"))


def test_a_plan_becomes_styles_with_whole_heads() -> None:
    rules = hf_rules(hf("llama tied"))
    styles = {name: str(rules.style_of(name)) for name in ("lm_head", "model.embed_tokens", "model.norm")}
    assert styles == {"lm_head": "head", "model.embed_tokens": "vocabulary", "model.norm": "None"}
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    found = [str(rules.style_of(f"model.layers.1.self_attn.{part}")) for part in parts]
    assert found == ["column:6", "column:2", "column:2", "row:6"]
    assert not rules.cuts_sequence


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_slice_of_the_whole_mask_is_what_one_process_drops(dim) -> None:
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    torch.manual_seed(3)
    whole, after = F.dropout(x, 0.3), torch.rand(1)
    for start in (0, 2):
        torch.manual_seed(3)
        part = part_dropout(x.narrow(dim, start, 2), 0.3, dim=dim, whole=x.size(dim), start=start)
        assert torch.equal(part, whole.narrow(dim, start, 2))
        assert torch.equal(torch.rand(1), after)  # the generator has moved as far


KINDS = [
    dict(is_causal=True),
    dict(is_causal=True, enable_gqa=True),
    dict(scale=0.3),
    dict(attn_mask=torch.ones(7, 7, dtype=torch.bool).tril()),
    dict(attn_mask=torch.linspace(-1, 1, 49, dtype=torch.float64).view(7, 7)),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", KINDS, ids=lambda keys: ",".join(keys))
def test_attention_written_out_is_torchs_own_with_its_dropout(keys, dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = 2 if keys.get("enable_gqa") else 4
    q, k, v = (torch.randn(2, h, 7, 6, generator=generator).to(dtype) for h in (4, heads, heads))
    keys = {
        key: value.to(dtype) if key == "attn_mask" and value.is_floating_point() else value
        for key, value in keys.items()
    }
    torch.manual_seed(5)
    theirs = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, **keys)
    torch.manual_seed(5)
    rest = dict(keys)
    ours = plain_attention(q, k, v, rest.pop("attn_mask", None), lambda weights: F.dropout(weights, 0.2), **rest)
    # a few roundings of numbers about 1; in bf16 the last one, to 8 bits, of numbers below 4
    bound = {torch.float64: 1e-14, torch.float32: 4e-6, torch.bfloat16: 2**-6}[dtype]
    assert (ours - theirs).abs().max() < bound and ours.dtype == dtype
