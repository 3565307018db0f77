"""Files written one tensor at a time are what the safetensors library reads, and a failing disk is told at the end."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from meshwright.errors import CheckpointError
from meshwright.train.stored import DTYPES
from meshwright.train.tensorfile import Entry, TensorWriter, in_file_order

TYPES = [getattr(torch, name) for name in DTYPES.values() if hasattr(torch, name)]

Table = dict[str, torch.Tensor]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Tensors of any type and shape, empty ones and scalars among them, of random bytes; NaNs too."""
    found: Table = {}
    names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
    for name in draw(st.lists(names, max_size=5, unique=True)):
        dtype, shape = draw(st.sampled_from(TYPES)), draw(st.lists(st.integers(0, 4), max_size=3))
        size = math.prod(shape) * dtype.itemsize
        raw = draw(st.binary(min_size=size, max_size=size))
        if dtype == torch.bool:
            raw = bytes(byte & 1 for byte in raw)
        flat = torch.tensor(list(raw), dtype=torch.uint8).view(dtype) if size else torch.zeros(0, dtype=dtype)
        found[name] = flat.reshape(shape)
    return found


def write(path: Path, table: Table) -> None:
    entries = in_file_order([Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in table.items()])
    writer = TensorWriter(path, entries)
    for entry in entries:
        writer.add(table[entry.name])
    writer.close()


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


FAST_PATHS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
"""One folder serves all examples: each writes its file anew."""


@FAST_PATHS
@given(tables())
def test_any_tensors_are_read_back_with_their_types_shapes_and_bits(tmp_path: Path, table: Table) -> None:
    write(tmp_path / "file", table)
    found = load_file(tmp_path / "file")
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {n: (t.dtype, t.shape) for n, t in table.items()}
    assert {n: raw(t) for n, t in found.items()} == {n: raw(t) for n, t in table.items()}


@FAST_PATHS
@given(tables())
def test_each_tensor_lies_on_a_multiple_of_its_types_size(tmp_path: Path, table: Table) -> None:
    write(tmp_path / "file", table)
    data = (tmp_path / "file").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 8 == 0
    for name, facts in json.loads(data[8:start]).items():
        assert (start + facts["data_offsets"][0]) % table[name].dtype.itemsize == 0
    assert len(data) == start + sum(t.numel() * t.dtype.itemsize for t in table.values())


def test_rows_can_be_read_alone_as_from_a_file_of_the_librarys_own(tmp_path: Path) -> None:
    table = {"a": torch.arange(20.0).reshape(5, 4), "b": torch.arange(7), "number": torch.tensor(3.0)}
    write(tmp_path / "ours", table)
    save_file(table, tmp_path / "theirs")
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        with safe_open(path, "pt") as file:
            assert torch.equal(file.get_slice("a")[1:3], table["a"][1:3])
            assert torch.equal(file.get_tensor("number"), table["number"])
            assert sorted(file.keys()) == ["a", "b", "number"]


def test_the_same_tensors_in_any_order_make_the_same_file(tmp_path: Path) -> None:
    table = {"b": torch.ones(3), "a": torch.ones(3, dtype=torch.int8), "c": torch.ones(2, dtype=torch.float64)}
    write(tmp_path / "one", table)
    write(tmp_path / "other", dict(reversed(table.items())))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_tensors_that_lie_otherwise_in_memory_or_want_a_gradient_are_written_as_they_read(tmp_path: Path) -> None:
    large = torch.arange(24.0).reshape(4, 6)
    table = {"turned": large.t(), "column": large[:, 1], "expanded": torch.ones(1, 3).expand(2, 3)}
    table["trained"] = torch.nn.Parameter(large * 2)
    write(tmp_path / "file", table)
    found = load_file(tmp_path / "file")
    assert all(torch.equal(found[name], tensor) for name, tensor in table.items())


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32])
def test_a_type_that_the_format_lacks_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    entries = [Entry("fine", torch.float32, (2,)), Entry("turns", dtype, (2,))]
    with pytest.raises(CheckpointError) as caught:
        TensorWriter(tmp_path / "file", entries)
    kind = str(dtype).removeprefix("torch.")
    assert str(caught.value) == f"tensor turns: is {kind}, which a safetensors file cannot hold."
    assert not (tmp_path / "file").exists()


def written(path: Path, tensor: torch.Tensor) -> TensorWriter:
    """Three tensors handed to a writer, each of which it takes without a word."""
    writer = TensorWriter(path, [Entry(name, tensor.dtype, tuple(tensor.shape)) for name in "abc"])
    for _ in range(3):
        writer.add(tensor)
    return writer


def test_a_file_that_cannot_be_made_is_told_at_close_and_not_before(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            written(tmp_path, torch.ones(3)).close()
    with pytest.raises(FileNotFoundError):
        written(tmp_path / "no" / "folder", torch.ones(3)).close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("size", [3, 1 << 20])
def test_a_full_disk_is_told_at_close_and_not_before(size: int) -> None:
    """Tensors that fit the buffer of the file, so that only the end writes, and larger ones. The file is closed."""
    with pytest.raises(OSError, match="No space left"):
        written(Path("/dev/full"), torch.ones(size)).close()
    gc.collect()  # what is left open warns, and here
