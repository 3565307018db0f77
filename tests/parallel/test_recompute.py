"""Recompute changes what is kept, never what comes out: gradients are equal bit by bit, with dropout."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.errors import SpecError
from meshwright.models.anatomy import repeated_blocks
from meshwright.models.build import build_reference
from meshwright.parallel.recompute import apply_recompute, keeps
from meshwright.parallel.seeding import MicrobatchSeeds
from meshwright.spec.sections import ModelSection
from meshwright.spec.shape import resolve_shape

aten = torch.ops.aten
MODES = ("selective", "full")


def reference(name="gpt2", mode="none", dtype=torch.float32, dropout=0.3):
    keys = {"n_kv_heads": 2, "head_dim": 10} if name == "llama" else {}
    section = ModelSection(name=name, n_layers=3, d_model=36, n_heads=6, d_ff=101, dropout=dropout, **keys)
    model = build_reference(resolve_shape(section, 24, 131), 0, dtype)
    apply_recompute(model, mode)
    return model


def tokens(microbatch):
    return torch.randint(0, 131, (2, 24), generator=torch.Generator().manual_seed(microbatch))


def loss_of(model, microbatch):
    rows = tokens(microbatch)
    return F.cross_entropy(model(rows).flatten(0, 1).float(), rows.roll(-1, 1).flatten())


def gradients(model, ahead):
    """Gradients of three microbatches; `ahead` forward passes run before a backward, as under 1F1B."""
    seeds, waiting = MicrobatchSeeds(0), []
    seeds.attach(model)
    for microbatch in range(3):
        seeds.at(1, microbatch)
        waiting.append(loss_of(model, microbatch))
        if len(waiting) > ahead:
            waiting.pop(0).backward()
    for loss in waiting:
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ahead", [0, 2])
def test_gradients_are_equal_bit_by_bit(name, dtype, mode, ahead):
    assert equal(gradients(reference(name, "none", dtype), 0), gradients(reference(name, mode, dtype), ahead))


@pytest.mark.parametrize("mode", MODES)
def test_without_dropout_the_fused_attention_is_recomputed_to_the_same_bits(mode):
    wanted = gradients(reference("llama", dropout=0.0), 0)
    assert equal(wanted, gradients(reference("llama", mode, dropout=0.0), 1))


class Watch(TorchDispatchMode):
    """Counts operators, and remembers every storage they made, without keeping it alive."""

    def __init__(self):
        super().__init__()
        self.storages, self.operators = {}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operators.append(func)
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def live_bytes(self):
        return sum(size for ref, size in self.storages.items() if not ref.expired())


def measured(name, mode, dropout=0.1):
    """Bytes that wait for backward, and the matrix products that backward makes."""
    model = reference(name, mode, dropout=dropout)
    forward, backward = Watch(), Watch()
    with forward:
        loss = loss_of(model, 0)
    kept = forward.live_bytes() - sum(p.nbytes for p in model.parameters())  # seen too, as views
    with backward:
        loss.backward()
    return kept, sum(op in (aten.mm.default, aten.addmm.default) for op in backward.operators)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_memory_falls_and_selective_repeats_no_matrix_product(name, dropout):
    none, selective, full = (measured(name, mode, dropout) for mode in ("none", *MODES))
    assert full[0] < 0.4 * none[0]
    assert full[0] < selective[0] < 0.8 * none[0]
    assert selective[1] == none[1] < full[1]


@pytest.mark.parametrize("mode", MODES)
def test_names_do_not_change(mode):
    plain, changed = reference(), reference(mode=mode)
    assert list(plain.state_dict()) == list(changed.state_dict())
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in changed.named_modules()]
    assert [name for name, _ in repeated_blocks(changed)] == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize("mode", MODES)
def test_a_deep_copy_runs_on_its_own_weights(mode):
    model = reference(mode=mode)
    twin = copy.deepcopy(model)
    for p in model.parameters():
        p.data.zero_()
    loss_of(twin, 0).backward()
    assert all(p.grad is not None and p.grad.any() for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_keeps_nothing(context):
    plain, changed = reference(dropout=0.0).eval(), reference(mode="full", dropout=0.0).eval()
    with context():
        assert torch.equal(plain(tokens(0)), changed(tokens(0)))


class Branch(nn.Module):
    """A block with keyword arguments, two results and, if asked, an activation in place."""

    def __init__(self, inplace):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(inplace)

    def forward(self, x, *, scale, extra=None):
        x = F.dropout(self.act(self.a(x)) * scale, 0.2, self.training)
        return self.b(x), extra


class Own(nn.Module):
    def __init__(self, mode, inplace=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Branch(inplace) for _ in range(2))
        apply_recompute(self, mode)

    def forward(self, x):
        extra = {"seen": 0}
        for layer in self.layers:
            x, extra = layer(x, scale=2.0, extra=extra)
        return x


@pytest.mark.parametrize(("mode", "inplace"), [("full", False), ("full", True), ("selective", False)])
def test_blocks_of_the_users_own(mode, inplace):
    found = []
    for model in (Own("none", inplace), Own(mode, inplace)):
        seeds = MicrobatchSeeds(0)
        seeds.attach(model)
        seeds.at(1, 0)
        loss = model(torch.linspace(-1, 1, 12).view(2, 6)).square().sum()
        seeds.at(1, 1)
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert equal(*found)


def test_selective_names_the_block_that_writes_over_what_is_kept():
    loss = Own("selective", inplace=True)(torch.linspace(-1, 1, 12).view(2, 6)).sum()
    with pytest.raises(SpecError, match=r"block `layers.1` changes the result.*in place"):
        loss.backward()


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))])
def test_a_model_without_blocks_is_refused(model):
    apply_recompute(model, "none")
    with pytest.raises(SpecError, match=r'train.recompute = "full".*no list of equal blocks.*nn.ModuleList'):
        apply_recompute(model, "full")


def test_attention_that_draws_is_computed_again():
    """On a GPU the fused kernel draws its own mask; a kept result would leave the generator behind."""
    q = torch.empty(1, 2, 8, 16)
    for operator, rest in (
        (aten._scaled_dot_product_flash_attention.default, ()),
        (aten._scaled_dot_product_efficient_attention.default, (None, True)),
        (aten._scaled_dot_product_cudnn_attention.default, (None, True)),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, ()),
    ):
        assert keeps(None, operator, q, q, q, *rest, 0.1, True) is CheckpointPolicy.PREFER_RECOMPUTE
        assert keeps(None, operator, q, q, q, *rest, 0.0, True) is CheckpointPolicy.MUST_SAVE
        assert keeps(None, operator, q, q, q, *rest) is CheckpointPolicy.MUST_SAVE


def test_batched_products_are_kept_unless_they_grow():
    scores, experts = (torch.empty(1, 64, 8), torch.empty(1, 8, 64)), (torch.empty(4, 64, 32), torch.empty(4, 32, 32))
    assert keeps(None, aten.bmm.default, *scores) is CheckpointPolicy.PREFER_RECOMPUTE
    assert keeps(None, aten.bmm.default, *experts) is CheckpointPolicy.MUST_SAVE
    assert keeps(None, aten.gelu.default, scores[0]) is CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_under_fsdp2(mode, compute, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = []
        for recompute in ("none", mode):
            model = reference("llama", recompute)
            mesh = init_device_mesh("cpu", (1,))
            for module in [*(block for _, block in repeated_blocks(model)), model]:
                fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=compute))
            found.append({name: grad.to_local() for name, grad in gradients(model, 1).items()})
        assert equal(*found)
    finally:
        dist.destroy_process_group()
