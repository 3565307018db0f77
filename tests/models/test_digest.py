"""`weights_sha256` against an implementation of its own, written from the definition and sharing no code."""

import hashlib
import struct

import pytest
import torch
from torch import nn

from meshwright.models.digest import state_items, weights_sha256


def by_definition(rows):
    """rows: (name, dtype text, shape text, bytes)."""
    total = hashlib.sha256()
    for name, dtype, shape, raw in sorted(rows):
        for text in (name, dtype, shape):
            total.update(text.encode("utf-8") + b"\x00")
        total.update(raw)
    return total.hexdigest()


def packed(code, values):
    return struct.pack(f"<{len(values)}{code}", *values)


def bf16(values):
    return b"".join(struct.pack("<f", v)[2:] for v in values)  # exact: the values below need 8 bits


def test_every_kind_of_tensor():
    grid = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    items = [
        ("w", grid),
        ("w.t", grid.T),  # not contiguous
        ("double", torch.tensor([0.1, -2.5], dtype=torch.float64)),
        ("bf", torch.tensor([1.5, -0.25], dtype=torch.bfloat16)),
        ("steps", torch.tensor(7)),
        ("flags", torch.tensor([True, False])),
        ("none", torch.empty(0, 4)),
        ("größe", torch.tensor([1, 2], dtype=torch.int32)),
        ("param", nn.Parameter(torch.ones(1))),
    ]
    rows = [
        ("w", "float32", "2,3", packed("f", [0, 1, 2, 3, 4, 5])),
        ("w.t", "float32", "3,2", packed("f", [0, 3, 1, 4, 2, 5])),
        ("double", "float64", "2", packed("d", [0.1, -2.5])),
        ("bf", "bfloat16", "2", bf16([1.5, -0.25])),
        ("steps", "int64", "", packed("q", [7])),
        ("flags", "bool", "2", b"\x01\x00"),
        ("none", "float32", "0,4", b""),
        ("größe", "int32", "2", packed("i", [1, 2])),
        ("param", "float32", "1", packed("f", [1.0])),
    ]
    assert weights_sha256(items) == by_definition(rows)
    assert weights_sha256(reversed(items)) == by_definition(rows)


@pytest.mark.parametrize("change", [lambda t: t.double(), lambda t: t.reshape(3, 2), lambda t: t + 1e-7])
def test_type_shape_and_every_bit_count(change):
    tensor = torch.ones(2, 3)
    assert weights_sha256([("w", tensor)]) != weights_sha256([("w", change(tensor))])
    assert weights_sha256([("w", tensor)]) != weights_sha256([("v", tensor)])


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.z, self.a = nn.Linear(2, 3), nn.Linear(2, 3)
        self.a.weight = self.z.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def get_extra_state(self):
        return {"anything": 1}

    def set_extra_state(self, state):
        pass


def test_items_are_sorted_parameters_and_persistent_buffers_with_ties_once():
    names = [name for name, _ in state_items(Odd())]
    norm = ["norm.bias", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "norm.weight"]
    assert names == ["a.bias", "a.weight", *norm, "z.bias"]
