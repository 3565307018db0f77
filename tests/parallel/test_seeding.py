"""Dropout masks depend on (seed, step, microbatch, module name) and the call, and on nothing else."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from meshwright.models.build import build_reference
from meshwright.parallel.seeding import MicrobatchSeeds, may_draw
from meshwright.spec.sections import ModelSection
from meshwright.spec.shape import resolve_shape

TOKENS = torch.randint(0, 31, (2, 12), generator=torch.Generator().manual_seed(0))


def reference(name="gpt2", dropout=0.3, n_layers=3):
    sizes = ModelSection(name=name, n_layers=n_layers, d_model=16, n_heads=2, dropout=dropout)
    return build_reference(resolve_shape(sizes, 12, 31), 0)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(torch.ones_like(x) + 0.0 * self.linear(x))  # the mask itself


class Own(nn.Module):
    """Dropout outside the blocks, functional dropout in the root, blocks that the model may checkpoint itself."""

    def __init__(self, own_checkpoint=False, repeat=1, noise=0):
        super().__init__()
        self.drop, self.layers = nn.Dropout(0.5), nn.ModuleList(Layer() for _ in range(2))
        self.own_checkpoint, self.repeat, self.noise = own_checkpoint, repeat, noise

    def forward(self, x):
        masks = [nn.functional.dropout(torch.ones_like(x), 0.5, self.training)]
        torch.rand(self.noise)  # stands for anything that draws an amount of its own
        masks.append(self.drop(torch.ones_like(x)))
        for _ in range(self.repeat):
            for layer in self.layers:
                torch.rand(self.noise)
                masks.append(checkpoint(layer, x, use_reentrant=False) if self.own_checkpoint else layer(x))
        return torch.stack(masks)


def attached(model, seed=0):
    seeds = MicrobatchSeeds(seed)
    seeds.attach(model)
    return seeds


def masks(model, seeds, step, microbatch):
    seeds.at(step, microbatch)
    return model(torch.zeros(4, 8))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_same_microbatch_of_the_same_step_draws_the_same(name):
    model = reference(name)
    seeds, others = attached(model), []
    seeds.at(3, 5)
    wanted = model(TOKENS)
    for step, microbatch in ((3, 4), (4, 5), (5, 3), (0, 0)):
        seeds.at(step, microbatch)
        others.append(model(TOKENS))
    torch.manual_seed(99), torch.rand(7)
    seeds.at(3, 5)
    assert torch.equal(model(TOKENS), wanted)
    assert not any(torch.equal(other, wanted) for other in others)


def test_all_points_draw_masks_of_their_own():
    model = Own()
    seeds = attached(model)
    seen = [*masks(model, seeds, 1, 0), *masks(model, seeds, 1, 1), *masks(model, seeds, 2, 0)]
    other = Own()
    seen += [*masks(other, attached(other, seed=1), 1, 0)]
    assert len({mask.detach().numpy().tobytes() for mask in seen}) == len(seen)


def test_what_is_drawn_between_points_does_not_matter():
    quiet, noisy = Own(), Own(noise=5)
    one, two = masks(quiet, attached(quiet), 1, 2), masks(noisy, attached(noisy), 1, 2)
    assert torch.equal(one, two)


def test_a_stage_alone_draws_what_it_draws_in_the_whole_model():
    whole, stage = Own(), Own()
    wanted = masks(whole, attached(whole), 4, 1)[-1]
    seeds = MicrobatchSeeds(0)
    last = stage.layers[1]
    seeds.attach(last, [("layers.1", last)])
    seeds.at(4, 1)
    assert torch.equal(last(torch.zeros(4, 8)), wanted)


def test_each_call_of_a_point_differs_and_at_starts_again():
    model = Own(repeat=2)
    seeds = attached(model)
    first = masks(model, seeds, 1, 0)
    assert len({mask.detach().numpy().tobytes() for mask in first}) == 6
    again = model(torch.zeros(4, 8))  # the loss calls the model twice
    assert not any(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(masks(model, seeds, 1, 0), first)


def test_functional_dropout_is_seeded_where_the_loss_calls_no_module():
    seeds = attached(Own())
    draws = []
    for other in (1, 2):
        torch.manual_seed(other)
        seeds.at(1, 1)
        draws.append(torch.rand(3))
    assert torch.equal(*draws)


def test_evaluation_leaves_the_generator_alone():
    model = Own().eval()
    attached(model)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    model(torch.zeros(4, 8))
    assert torch.equal(before, torch.get_rng_state())


def test_handles_take_the_hooks_off():
    model = reference()
    handles = MicrobatchSeeds(0).attach(model)
    assert len(handles) == 1 + 3 + 1  # root, blocks, the dropout after the embedding
    for handle in handles:
        handle.remove()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_reference_model_without_dropout_is_left_alone():
    assert MicrobatchSeeds(0).attach(reference(dropout=0.0)) == []
    assert not may_draw(reference(dropout=0.0)) and may_draw(reference()) and may_draw(nn.Linear(1, 1))


def test_a_deep_copy_follows_the_same_loop():
    model = Own()
    seeds = attached(model)
    twin = copy.deepcopy(model)
    assert torch.equal(masks(model, seeds, 1, 0), masks(twin, seeds, 1, 0))
    assert not torch.equal(masks(twin, seeds, 1, 0), masks(twin, seeds, 1, 1))


def test_under_ddp(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        bare, wrapped = reference(), reference()
        seeds, others = attached(bare), attached(wrapped)
        ddp = DistributedDataParallel(wrapped)
        seeds.at(2, 3)
        wanted = bare(TOKENS)
        others.at(2, 3)
        assert torch.equal(ddp(TOKENS), wanted)
    finally:
        dist.destroy_process_group()


def gradients(model, seeds, positions):
    """All forward passes first, then all backward passes: in backward the seeds are at the last microbatch."""
    model.zero_grad()
    losses = []
    for step, microbatch in positions:
        seeds.at(step, microbatch)
        x = torch.linspace(0, 1, 32).view(4, 8)
        losses.append((model(x) * model(x + 1)).square().sum())
    for loss in losses:
        loss.backward()
    return [p.grad.clone() for p in model.parameters()]


class Drawing(nn.Module):
    def __init__(self, own_checkpoint, repeat):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(3))
        self.own_checkpoint, self.repeat = own_checkpoint, repeat

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        for _ in range(self.repeat):
            if self.own_checkpoint == "all":
                x = checkpoint(self.run, x, use_reentrant=False)
            else:
                for layer in self.layers:
                    x = checkpoint(layer, x, use_reentrant=False) if self.own_checkpoint else layer(x)
        return x


@pytest.mark.parametrize("own_checkpoint", ["each", "all"])
@pytest.mark.parametrize("repeat", [1, 2])
def test_checkpoint_inside_the_users_own_model(own_checkpoint, repeat):
    torch.manual_seed(0)
    plain = Drawing("", repeat)
    theirs = Drawing(own_checkpoint, repeat)
    theirs.load_state_dict(plain.state_dict())
    positions = [(1, 0), (1, 1), (1, 2)]
    wanted = gradients(plain, attached(plain), positions)
    found = gradients(theirs, attached(theirs), positions)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_seeds_stay_what_they_are_between_versions():
    """A resumed run must draw what the run before it would have drawn, so these numbers may not change."""
    model, seen = Own(), []
    seeds = attached(model, seed=7)
    for layer in (model, *model.layers):
        layer.register_forward_pre_hook(lambda m, args: seen.append(torch.default_generator.initial_seed()))
    masks(model, seeds, 3, 5)
    assert seen == [6516824698242348039, 1272227159872824613, 7412473075716301553]
