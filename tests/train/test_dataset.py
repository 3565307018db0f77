"""A map-style data set: the same batches for any number of loader processes, and every way in which it can fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from meshwright.errors import DataError
from meshwright.train.dataset import DatasetSource
from meshwright.train.loader import Microbatch
from train.loading import cut, wait_until


class Squares:
    def __len__(self) -> int:
        return 11

    def __getitem__(self, i: int) -> tuple[int, dict[str, float]]:
        return i, {"square": float(i * i)}


def batches(dataset: Any, workers: int, places: Any = None, **keys: Any) -> list[Microbatch]:
    return list(DatasetSource(dataset, 0, workers, **keys).stream(places or cut(len(dataset)).places(0, 6)))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_data_set_gives_the_same_batches_for_any_number_of_workers(workers: int) -> None:
    places = list(cut(11).places(0, 6))
    got = batches(Squares(), workers, iter(places))
    assert [(m.step, m.index, m.last, m.ids.tolist()) for m in got] == [
        (p.step, p.index, p.last, p.ids.tolist()) for p in places
    ]
    assert all(m.batch[0].tolist() == m.ids.tolist() for m in got)
    assert all(m.batch[1]["square"].tolist() == [float(i * i) for i in m.ids] for m in got)


def test_a_stand_in_has_rows_and_no_ids() -> None:
    dealt = list(cut(6, 4, 1, ranks=4, rank=3).places(1, 2))  # 2 samples for 4 ranks
    (microbatch,) = batches(Squares(), 0, iter(dealt))
    assert microbatch.ids.size == 0 and len(microbatch.batch[0]) == 1 and microbatch.last


@pytest.mark.parametrize("workers", [0, 2])
def test_own_collate_is_used(workers: int) -> None:
    got = batches(Squares(), workers, collate=lambda items: [item[0] for item in items])
    assert all(m.batch == m.ids.tolist() for m in got)


def test_closing_a_stream_early_ends_its_workers() -> None:
    before = children()
    stream = DatasetSource(Squares(), 0, 2).stream(cut(11).places(0, 10**6))
    next(stream)
    assert len(children() - before) == 2
    stream.close()
    assert wait_until(lambda: not children() - before)


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


class Fails:
    """Raises at sample 7, in the way asked for."""

    def __init__(self, deed: Callable[[], Any]) -> None:
        self.deed = deed

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return self.deed() if i == 7 else torch.zeros(2)


def raising(error: BaseException) -> Callable[[], Any]:
    def deed() -> Any:
        raise error

    return deed


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "error": (
        raising(ValueError("a bad row")),
        r"sample 7 of the data set Fails: raised ValueError: a bad row \(.*py:\d+\)",
    ),
    "silent error": (raising(AssertionError()), r"sample 7 .* raised AssertionError"),
    "long error": (raising(KeyError("x\n" * 500)), r"sample 7 .* raised KeyError"),
    "own error": (raising(DataError("a", "b")), r"sample 7 .* raised DataError: a: b"),
    "ragged": (lambda: torch.zeros(3), r"2 items of the data set: do not make a batch: RuntimeError: "),
    "nothing": (lambda: None, r"2 items .* TypeError"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", WRONG)
def test_a_bad_sample_is_named_in_one_line_without_traceback(kind: str, workers: int) -> None:
    deed, match = WRONG[kind]
    got = []
    with pytest.raises(DataError, match=match) as caught:
        for microbatch in DatasetSource(Fails(deed), 0, workers).stream(cut(8).places(0, 2)):
            got.append(microbatch.ids.tolist())
    assert 7 not in [i for ids in got for i in ids] and len(got) < 4
    message = str(caught.value)
    assert "Traceback" not in message and "\n" not in message and len(message) < 500


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_that_fails_without_a_word_is_said(workers: int) -> None:
    with pytest.raises(DataError, match="2 items of the data set: do not make a batch: ValueError"):
        batches(Squares(), workers, collate=lambda items: raising(ValueError())())


def test_a_loader_process_that_dies_is_said_where_its_batch_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    look = _MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(look, "__defaults__", (0.2,))  # seconds between looks, 5 by default
    before, parent = signal.getsignal(signal.SIGCHLD), os.getpid()
    deed = lambda: os.kill(os.getpid(), signal.SIGKILL) if os.getpid() != parent else None  # noqa: E731
    with pytest.raises(DataError, match=r"a loader process of the data set Fails: died.*Out of memory"):
        batches(Fails(deed), 1)
    assert signal.getsignal(signal.SIGCHLD) is before  # torch's would raise anywhere in the training loop


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class NoLength(Squares):
    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("dataset", "match"),
    [
        (Stream(), "Stream: is not map-style.*class with __len__ and __getitem__"),
        (iter([1]), "list_iterator: is not map-style"),
        ({1, 2}, "set: is not map-style"),
        ([], "list: is empty"),
        (NoLength(), "length of the data set NoLength: raised NotImplementedError"),
    ],
)
def test_what_is_no_map_style_data_set_is_refused(dataset: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        DatasetSource(dataset, 0, 0)
