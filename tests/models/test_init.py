"""Initial weights are a function of (seed, parameter name): not of order, dtype, device or what was drawn before."""

import math

import pytest
import torch

from meshwright.models.build import build_reference
from meshwright.models.init import generator, initial_value
from meshwright.spec.sections import ModelSection
from meshwright.spec.shape import resolve_shape


def shape(name, **keys):
    return resolve_shape(ModelSection(name=name, **({"n_layers": 2, "d_model": 64, "n_heads": 4} | keys)), 32, 131)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name_of", ["gpt2", "llama"])
def test_the_seed_decides_and_nothing_else(name_of):
    torch.manual_seed(1)
    one = weights(build_reference(shape(name_of), 7))
    torch.manual_seed(2)
    torch.rand(5)
    names = list(one)[::-1]  # another order of draws
    assert equal(one, {name: initial_value(name, one[name].shape, 7, shape(name_of).n_layers) for name in names})
    other = weights(build_reference(shape(name_of), 8))
    assert all(not torch.equal(one[n], other[n]) for n in one if one[n].dim() == 2)


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    build_reference(shape("gpt2"), 0)
    assert torch.equal(before, torch.get_rng_state())


def test_names_matter():
    one = weights(build_reference(shape("llama"), 0))
    assert not torch.equal(one["blocks.0.attention.key.weight"], one["blocks.0.attention.value.weight"])
    assert not torch.equal(one["blocks.0.attention.key.weight"], one["blocks.1.attention.key.weight"])


def test_more_layers_leave_the_first_ones_as_they_were():
    small, large = weights(build_reference(shape("llama"), 0)), weights(build_reference(shape("llama", n_layers=5), 0))
    assert all(torch.equal(small[n], large[n]) for n in small if not n.endswith(("out.weight", "down.weight")))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_fp64_starts_from_the_values_of_fp32(name):
    single, double = build_reference(shape(name), 3), build_reference(shape(name), 3, torch.float64)
    assert equal(weights(single.double()), weights(double))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_distributions(name):
    model = build_reference(shape(name, d_model=128, d_ff=509), 0)
    for at, p in model.named_parameters():
        if at.endswith("bias"):
            assert not p.any()
        elif "norm" in at:
            assert (p == 1).all()
        else:
            std = 0.02 / math.sqrt(2 * 2) if at.endswith(("attention.out.weight", "feed_forward.down.weight")) else 0.02
            error = std / math.sqrt(2 * p.numel())  # of a sample's standard deviation
            assert abs(p.std().item() - std) < 5 * error, at
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), at


def test_a_tied_weight_is_drawn_for_its_first_name():
    model = build_reference(shape("gpt2"), 0)
    wanted = initial_value("embedding.weight", model.embedding.weight.shape, 0, 2)
    assert torch.equal(model.head.weight, wanted)
    untied = build_reference(shape("gpt2", tied_embeddings=False), 0)
    assert torch.equal(untied.embedding.weight, wanted)
    assert not torch.equal(untied.head.weight, wanted)


def test_seeds_stay_what_they_are_between_versions():
    """The same recipe must start from the same weights tomorrow, so this number may not change."""
    assert generator(7, "blocks.0.attention.query.weight").initial_seed() == 4788636816853072668
