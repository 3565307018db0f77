"""Tensor and pipeline parallelism, alone and with data parallelism, train what one process trains.

`make matrix` runs all of it; `make test` a sample in which each layout, schedule and model occurs.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.spec.layout import parse_layout
from train.matrix import BOUNDS
from train.parity import Record, largest_distances
from train.spread_matrix import CELLS, layers_of, sampled, table_of, trainings

Kind = tuple[str, bool]
"""Compute type, and whether gradients are summed exactly."""

WORSE = 3.0
"""How much further from fp64 an fp32 gradient may be under tp than in one process. tp cuts inside matrix products, so
sums round at other places and at some more of them: an error of the same kind and size, but another one."""


@pytest.fixture(scope="module")
def single(run_ranks):
    """What one process trains; each model once."""
    known: dict[Any, tuple[Record, str]] = {}

    def train(schedule: str, model: str, kinds: list[Kind], n_layers: int) -> dict[Kind, tuple[Record, str]]:
        found = {}
        for kind, table in _tables("single", schedule, model, kinds, n_layers).items():
            at = (model, n_layers, table["train"]["recompute"], kind)
            if at not in known:
                ((known[at],),) = run_ranks(1, trainings, table, limit_s=120.0)
            found[kind] = known[at]
        return found

    return train


def _kinds(layout: str, is_sample: bool) -> list[Kind]:
    """What a cell trains; exact mode promises one digest where tp is 1.

    The sample leaves fp32 out that is summed as usual, where it is summed exactly too.
    """
    if parse_layout(layout).tp > 1:
        return [("fp64", False), ("fp32", False)]
    return [("fp64", False), *([] if is_sample else [("fp32", False)]), ("fp32", True)]


def _tables(layout: str, schedule: str, model: str, kinds: list[Kind], n_layers: int) -> dict[Kind, dict[str, Any]]:
    tables = {kind: table_of(layout, schedule, model, kind[0], exact=kind[1], n_layers=n_layers) for kind in kinds}
    for table in tables.values():
        if table["layout"]["pp"] == 1:
            table["layout"].pop("pp_schedule", None)
    return tables


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, marks=[] if sampled(c) else pytest.mark.matrix, id=" ".join(filter(None, c))) for c in CELLS],
)
def test_a_layout_trains_what_one_process_trains(run_ranks, single, pytestconfig, cell) -> None:
    layout, schedule, model = cell
    degrees = parse_layout(layout)
    kinds = _kinds(layout, "not matrix" in pytestconfig.getoption("markexpr"))
    n_layers = layers_of(layout)
    tables = _tables(layout, schedule, model, kinds, n_layers)
    ranks = run_ranks(degrees.world_size, trainings, *(tables[kind] for kind in kinds), limit_s=300.0, timeout_s=100.0)
    expected = single(schedule, model, kinds, n_layers)
    for i, kind in enumerate(kinds):
        found, digest = ranks[0][i]
        for rank in ranks:
            assert (rank[i][0].losses, rank[i][0].norms) == (found.losses, found.norms)
        of_one, one_digest = expected[kind]
        ids = [sorted(number for rank in ranks for number in rank[i][0].ids[step]) for step in range(len(found.ids))]
        assert ids == [sorted(step) for step in of_one.ids]
        if kind == ("fp32", True):
            assert (digest, found.losses, found.norms) == (one_digest, of_one.losses, of_one.norms)
        elif degrees.tp > 1 and kind[0] == "fp32":
            true = expected["fp64", False][0]
            far, own = largest_distances(found, true), largest_distances(of_one, true)
            assert far["gradient"] <= WORSE * own["gradient"], f"{far} beside {own}"
            assert all(far[name] <= BOUNDS["fp32"][name] for name in far if name != "gradient"), far
        else:
            far = largest_distances(found, of_one)
            assert all(far[name] <= BOUNDS[kind[0]][name] for name in far), f"{far} against {BOUNDS[kind[0]]}"
