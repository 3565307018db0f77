"""Microbatches in their order, ready ahead, and every way in which a data set can fail."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from meshwright.errors import DataError
from meshwright.train.corpus import Corpus, PackedRows
from meshwright.train.loader import TokenSource, read_ahead, to_device
from train.loading import cut, wait_until

THREAD = "meshwright-loader"


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def test_reading_ahead_keeps_the_order_and_stays_within_its_depth() -> None:
    taken = []

    def items() -> Iterator[int]:
        for i in range(20):
            taken.append(i)
            yield i

    stream = read_ahead(items(), 3)
    assert taken == []  # nothing runs before it is asked
    assert next(stream) == 0
    assert wait_until(lambda: len(taken) >= 4)
    time.sleep(0.05)
    assert len(taken) <= 5  # one given out, three held, one in hand
    assert list(stream) == list(range(1, 20))
    assert wait_until(lambda: not loader_threads())


def test_closing_early_ends_the_thread_whatever_it_is_doing() -> None:
    stream = read_ahead(iter(range(10**9)), 2)
    assert next(stream) == 0 and loader_threads()
    stream.close()
    assert wait_until(lambda: not loader_threads(), 1.0)
    forgotten = read_ahead(iter(range(10**9)), 2)
    next(forgotten)
    del forgotten
    assert wait_until(lambda: not loader_threads(), 1.0)


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), DataError("a", "b")])
def test_an_error_is_raised_where_its_item_was_due(error: BaseException) -> None:
    def items() -> Iterator[int]:
        yield 0
        yield 1
        raise error

    stream = read_ahead(items(), 8)
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(type(error)) as caught:
        next(stream)
    assert caught.value is error
    assert wait_until(lambda: not loader_threads())


@pytest.mark.parametrize("mapped", [False, True])
def test_token_rows_come_in_the_order_of_their_places(mapped: bool, tmp_path: Any) -> None:
    ids = np.arange(200, dtype=np.uint8)
    ids.tofile(tmp_path / "ids")
    held = np.memmap(tmp_path / "ids", dtype=np.uint8, mode="r") if mapped else ids
    rows = PackedRows(held, 4)
    places = list(cut(rows.num_rows).places(0, 30))
    got = list(TokenSource(Corpus(rows, 256, "")).stream(iter(places)))
    assert [(m.step, m.epoch, m.index, m.last) for m in got] == [(p.step, p.epoch, p.index, p.last) for p in places]
    for microbatch in got:
        first = torch.from_numpy(microbatch.ids * 4)[:, None]
        assert torch.equal(microbatch.batch["tokens"], first + torch.arange(4))
        assert torch.equal(microbatch.batch["labels"], first + torch.arange(1, 5))
    assert {microbatch.epoch for microbatch in got} == {0, 1, 2}


class Mover(dict):  # type: ignore[type-arg]
    def to(self, device: torch.device) -> str:
        return f"moved to {device}"


def test_nested_batches_are_moved_and_keep_their_classes() -> None:
    point = namedtuple("point", "x y")
    one, device = torch.ones(2), torch.device("meta")
    counted: Any = defaultdict(int, a=one)
    batch = {
        "list": [one, "text", 3],
        "tuple": (one, None),
        "point": point(one, 1),
        "dict": OrderedDict(a=one),
        "d": counted,
    }
    moved = to_device(batch, device)
    assert moved["list"][0].is_meta and moved["list"][1:] == ["text", 3]
    assert moved["tuple"][0].is_meta and isinstance(moved["point"], point) and moved["point"].x.is_meta
    assert type(moved["dict"]) is OrderedDict and moved["dict"]["a"].is_meta
    assert type(moved["d"]) is defaultdict and moved["d"]["a"].is_meta and counted["a"] is one
    assert to_device({"x": Mover()}, torch.device("cpu")) == {"x": "moved to cpu"}
    packed = pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
    assert isinstance(to_device(packed, torch.device("cpu")), PackedSequence)
    assert to_device(range(3), device) == range(3)
