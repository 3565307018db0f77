"""What the optimizer has in the parameters' places: their memory, their state, and which rows a rank has."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright.errors import SpecError
from meshwright.parallel.leaves import (
    LANES,
    Leaf,
    local,
    padded_gradient,
    padded_leaf,
    plain_leaf,
    require_own_memory,
    rows_here,
    whole,
)

SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)
MASTERS = st.sampled_from([torch.float32, torch.float64])


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + math.prod(shape), dtype=dtype).reshape(shape)


def require_padded(leaf: Leaf, before: torch.Tensor) -> None:
    """Whole vectors over the memory of this rank's part, which has the values of before, and zeros behind."""
    here, n = local(leaf.parameter), before.numel()
    flat = leaf.leaf.detach()
    assert torch.equal(here, before)
    assert flat.ndim == 1 and len(flat) % LANES == 0 and flat.dtype == before.dtype
    assert torch.equal(flat[:n], before.reshape(-1)) and not flat[n:].any()
    assert not n or flat.data_ptr() == here.data_ptr()
    flat[:n].mul_(2)
    assert torch.equal(local(leaf.parameter), 2 * before)
    here.copy_(before)
    assert torch.equal(flat[:n], before.reshape(-1)) and not flat[n:].any()


@given(SHAPES, MASTERS)
def test_a_padded_leaf_is_the_parameters_memory_with_zeros_behind(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    before = numbered(shape, dtype)
    parameter = nn.Parameter(before.clone())
    leaf = padded_leaf("name", parameter)
    assert leaf.parameter is parameter and leaf.leaf.is_leaf and leaf.leaf.requires_grad
    assert len(leaf.leaf) - before.numel() < LANES
    require_padded(leaf, before)
    require_padded(padded_leaf("name", parameter), before)  # once more: it is long enough already


def test_parameters_that_share_memory_or_lie_otherwise_get_memory_of_their_own() -> None:
    """A transposed one, an expanded one, a window of a larger tensor, and two over one memory."""
    large = numbered((6, 4))
    shared = numbered((4, 4))
    odd = {
        "turned": large.clone().t(),
        "window": large[2:4],
        "column": large[:, 1],
        "expanded": torch.ones(3, 1).expand(3, 5),
        "first": shared,
        "second": shared,
        "upper half": shared[:2],
    }
    before = {name: tensor.clone() for name, tensor in odd.items()}
    parameters = {name: nn.Parameter(tensor) for name, tensor in odd.items()}
    leaves = {name: padded_leaf(name, parameter) for name, parameter in parameters.items()}
    for name, leaf in leaves.items():
        require_padded(leaf, before[name])
        leaf.leaf.data.zero_()
        for other in leaves.keys() - {name}:
            assert torch.equal(parameters[other], before[other]), (name, other)
        parameters[name].data.copy_(before[name])
    assert torch.equal(large[2:4], before["window"])


@given(SHAPES, MASTERS)
def test_state_of_a_padded_leaf_has_the_parts_shape_in_files_and_comes_back(shape: Any, dtype: torch.dtype) -> None:
    leaf = padded_leaf("name", nn.Parameter(numbered(shape, dtype)))
    moment = torch.zeros_like(leaf.leaf)
    moment[: math.prod(shape)] = 3 * numbered(shape, dtype).reshape(-1)
    part = leaf.part(moment)
    assert torch.equal(part, 3 * numbered(shape, dtype))
    laid = leaf.laid(part.clone())
    assert laid.shape == moment.shape and torch.equal(laid, moment)
    for number in (torch.tensor(7.0), torch.tensor(7, dtype=torch.int64)):
        assert torch.equal(leaf.part(number), number)
        assert not shape or torch.equal(leaf.laid(number), number)
    assert leaf.laid(part.half()).dtype == torch.float16  # state may have a type of its own


@given(SHAPES)
@example((3, 5, 8))  # as many elements as the last state, which has another shape
def test_state_of_a_plain_leaf_stays_as_it_is(shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(numbered(shape))
    leaf = plain_leaf("name", parameter)
    assert leaf.leaf is parameter
    for state in (numbered(shape) * 2, torch.tensor(3.0), torch.ones(2, 3, 4, 5)):
        assert torch.equal(leaf.part(state), state) and torch.equal(leaf.laid(leaf.part(state)), state)


@given(SHAPES, st.floats(-4.0, 4.0, width=32))
def test_a_padded_gradient_is_scaled_once_with_zeros_behind(shape: tuple[int, ...], factor: float) -> None:
    leaf = padded_leaf("name", nn.Parameter(numbered(shape)))
    part = numbered(shape[::-1]).permute(tuple(reversed(range(len(shape)))))  # not contiguous
    gradient = padded_gradient(leaf.leaf, part, factor)
    assert gradient.shape == leaf.leaf.shape
    assert torch.equal(gradient[: part.numel()], (part * factor).reshape(-1)) and not gradient[part.numel() :].any()


def test_an_update_of_a_padded_leaf_is_the_parameters_whatever_its_length() -> None:
    for n in (1, 3, 63, 64, 65, 130):
        parameter, alone = nn.Parameter(numbered((n,))), nn.Parameter(numbered((n,)))
        leaf = padded_leaf("name", parameter)
        ours, theirs = (torch.optim.AdamW([p], lr=0.1, foreach=False) for p in (leaf.leaf, alone))
        for step in range(3):
            alone.grad = numbered((n,)).sin() + step
            leaf.leaf.grad = padded_gradient(leaf.leaf, alone.grad, 1.0)
            ours.step()
            theirs.step()
        # AdamW in eager kernels: vectors and their tails differ by some roundings of 6e-8
        assert torch.allclose(parameter, alone, rtol=1e-6)
        assert not leaf.leaf[n:].any()  # decay and moments of zeros are zeros


ROWS = range(1, 9)


def cut_in_all_ways(world: Any) -> int:
    """Each number of rows cut by DTensor and by FSDP, over all ranks and in replicas; how many were compared."""
    n, compared = world.world_size, 0
    meshes = [(init_device_mesh("cpu", (n,)), [Shard(0)])]
    if n == 4:
        meshes.append((init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), [Replicate(), Shard(0)]))
    for mesh, placements in meshes:
        for rows in ROWS:
            full = numbered((rows, 3))
            by_hand: Any = distribute_tensor(full, mesh, placements)
            layer = nn.Linear(3, rows)
            layer.weight.data.copy_(full)
            fully_shard(layer, mesh=mesh)
            for cut in (by_hand, layer.weight):
                here = rows_here(cut)
                assert here.stop - here.start == len(local(cut)) == len(range(rows)[here])
                assert torch.equal(full[here], local(cut))
                assert torch.equal(whole(local(cut), cut), full) and torch.equal(whole(local(cut) * 2, cut), full * 2)
                number = torch.tensor(5.0)
                assert whole(number, cut) is number
                compared += 1
        assert rows_here(distribute_tensor(numbered((4,)), mesh, [Replicate()] * mesh.ndim)) == slice(None)
    assert rows_here(nn.Parameter(numbered((4,)))) == slice(None)
    return compared


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rows_here_are_those_that_a_dtensor_has_also_where_ranks_have_none(run_ranks, ranks: int) -> None:
    assert run_ranks(ranks, cut_in_all_ways) == [2 * len(ROWS) * (1 + (ranks == 4))] * ranks


def leaves_of_cut_layers(world: Any) -> list[int]:
    """Plain and padded leaves of what FSDP has cut; state goes to its part and back; a step through a leaf is seen."""
    mesh, lengths = init_device_mesh("cpu", (world.world_size,)), []
    for rows in ROWS:
        layer = nn.Linear(3, rows, bias=False)
        layer.weight.data.copy_(numbered((rows, 3)))
        fully_shard(layer, mesh=mesh)
        parameter: Any = layer.weight
        before = local(parameter).clone()
        plain = plain_leaf("weight", parameter)
        assert not isinstance(plain.leaf, DTensor) and plain.leaf.data_ptr() == local(parameter).data_ptr()
        padded = padded_leaf("weight", parameter)
        require_padded(padded, before)
        moment = torch.zeros_like(padded.leaf)
        moment[: before.numel()] = 5 * before.reshape(-1)
        assert torch.equal(padded.part(moment), 5 * before)
        assert torch.equal(padded.laid(padded.part(moment)), moment)
        itself = Leaf("weight", parameter, parameter)
        state = parameter.detach() * 5
        assert torch.equal(itself.part(state), 5 * before)
        again = itself.laid(itself.part(state))
        assert isinstance(again, DTensor) and torch.equal(again.full_tensor(), state.full_tensor())
        padded.leaf.data.mul_(2)
        x = torch.eye(3)
        assert torch.equal(layer(x), 2 * numbered((rows, 3)).t())  # what was written is what is gathered
        lengths.append(before.numel())
    return lengths


def test_leaves_of_cut_parameters_alias_this_ranks_part(run_ranks) -> None:
    ranks = run_ranks(3, leaves_of_cut_layers)
    assert [sum(lengths) for lengths in zip(*ranks, strict=True)] == [3 * rows for rows in ROWS]
    assert 0 in ranks[2]


def test_parameters_that_share_memory_are_refused_before_they_are_parted() -> None:
    """A window beside another one of the same tensor is no overlap; a tied parameter is one."""
    shared = numbered((4, 4))
    apart = [("a", nn.Parameter(shared[:2])), ("b", nn.Parameter(shared[2:])), ("c", nn.Parameter(numbered((4, 4))))]
    require_own_memory([*apart, ("empty", nn.Parameter(shared[:0])), ("meta", nn.Parameter(shared.to("meta")))])
    for name, other in (("whole", shared), ("row", shared[1]), ("column", shared[:, 2])):
        with pytest.raises(SpecError, match="share memory, and are two parameters"):
            require_own_memory([*apart, (name, nn.Parameter(other))])
