"""Blocks, ties, order and running statistics, read off modules of many makes."""

import pytest
import torch
from torch import nn

from meshwright.models.anatomy import batch_norms, is_bare_layer, parameters_in_order, repeated_blocks, tied_groups
from meshwright.models.build import build_reference
from meshwright.spec.sections import ModelSection
from meshwright.spec.shape import resolve_shape


class Block(nn.Module):
    def __init__(self, parts=0):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(parts))


class Other(Block):
    pass


class Stage(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.down = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(depth))


class Holder(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def blocks(kind, count, *args):
    return nn.ModuleList(kind(*args) for _ in range(count))


def names(model):
    return [name for name, _ in repeated_blocks(model)]


def numbered(prefix, count):
    return [f"{prefix}.{i}" for i in range(count)]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("n_layers", [1, 3])
def test_reference_models(name, n_layers):
    section = ModelSection(name=name, n_layers=n_layers, d_model=16, n_heads=2)
    assert names(build_reference(resolve_shape(section, 8, 11), 0)) == numbered("blocks", n_layers)


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (Holder(tail=blocks(Other, 2), body=blocks(Block, 3)), numbered("body", 3)),  # the larger family
        (Holder(body=blocks(Block, 2, 8)), numbered("body", 2)),  # experts are inside a block
        (
            Holder(stages=nn.ModuleList(Stage(n) for n in (1, 2))),
            ["stages.0.layers.0", *numbered("stages.1.layers", 2)],
        ),
        (nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block())), ["0.0", "0.1", "1.0"]),
        (Holder(one=blocks(Block, 2), two=blocks(Block, 2)), numbered("one", 2) + numbered("two", 2)),
        (nn.Sequential(nn.Embedding(3, 4), Block(), Block(), nn.Linear(4, 3)), ["1", "2"]),
        (nn.ModuleDict({"a": Holder(h=nn.ModuleDict({"x": Block(), "y": Block()}))}), ["a.h.x", "a.h.y"]),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "2"]),  # nothing larger is repeated
        (nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))), ["0", "1", "2"]),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), []),
        (nn.Linear(4, 4), []),
        (Holder(a=nn.Linear(4, 4), b=nn.Linear(4, 4)), []),
        (Holder(acts=nn.ModuleList([nn.ReLU(), nn.ReLU()])), []),
    ],
)
def test_blocks_are_found(model, wanted):
    assert names(model) == wanted


def test_a_block_held_several_times_is_one():
    shared = Block()
    assert names(Holder(body=nn.ModuleList([shared] * 4))) == ["body.0"]


def test_torch_transformer():
    model = nn.Transformer(4, 2, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=4, batch_first=True)
    assert names(model) == numbered("decoder.layers", 3)


def test_bare_layers():
    assert (
        is_bare_layer(nn.Linear(1, 1))
        and not is_bare_layer(Block())
        and not is_bare_layer(nn.TransformerEncoderLayer(4, 1))
    )


def test_ties_and_order():
    model = Holder(z=nn.Linear(2, 2), m=nn.Linear(2, 2), a=nn.Linear(2, 2, bias=False))
    model.a.weight = model.z.weight
    assert tied_groups(model) == [["a.weight", "z.weight"]]
    order = parameters_in_order(model)
    assert [name for name, _ in order] == ["a.weight", "m.bias", "m.weight", "z.bias"]
    assert order[0][1] is model.z.weight
    assert tied_groups(nn.Linear(2, 2)) == []


def test_batch_norms_are_those_that_keep_statistics():
    model = nn.Sequential(
        nn.BatchNorm1d(2), nn.BatchNorm2d(2, track_running_stats=False), nn.LayerNorm(2),
        nn.InstanceNorm1d(2, track_running_stats=True), nn.InstanceNorm1d(2), nn.SyncBatchNorm(2),
    )  # fmt: skip
    assert batch_norms(model) == ["0", "3", "5"]


def test_a_model_is_not_run_or_changed():
    model = Holder(body=blocks(Block, 2))
    before = torch.get_rng_state()
    repeated_blocks(model)
    assert torch.equal(before, torch.get_rng_state())
