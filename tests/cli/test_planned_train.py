"""`train` with an open layout: what is planned, what is said of it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from meshwright.cli import plan_run as planning
from meshwright.cli.plan_run import plan_run
from meshwright.cli.planned import leaves_open
from meshwright.errors import BatchError, NoFeasibleLayout
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import resolve
from meshwright.spec.load import load
from meshwright.spec.local_cluster import local_cluster

MIB = 1 << 20
RECIPE = """
[model]
name = "llama"
n_layers = 4
d_model = 512
n_heads = 8
vocab_size = 8000
[data]
seq_len = 256
[batch]
global_batch_size = 32
[optimizer]
lr = 1e-3
[train]
steps = 2
"""
FIXED_MIB = 0.4 * 1024
"""What a CPU process has before it trains."""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return str(path)


def planned(recipe: str, nproc: int, *sets: str):
    return plan_run(load(recipe, list(sets)), recipe, sets, nproc)


@pytest.fixture
def machine(monkeypatch):
    """A machine whose processes have so many MiB each, besides what they need before they train."""

    def of(mib: int) -> None:
        def small(devices_per_node: int | None = None) -> Cluster:
            cluster = local_cluster(devices_per_node)
            device = dataclasses.replace(cluster.device, memory_bytes=round((FIXED_MIB + mib) * MIB))
            return dataclasses.replace(cluster, device=device)

        monkeypatch.setattr(planning, "local_cluster", small)

    return of


def test_where_everything_fits_the_first_rung_is_taken_and_the_microbatch_stays(recipe) -> None:
    found = planned(recipe, 4)
    assert resolve(found.recipe.layout, 4).word == "ddp4"
    assert found.recipe.batch.microbatch_size is None
    assert found.recipe.train == load(recipe, []).train
    assert found.lines[0].startswith("planned: ddp4, 1 microbatch of 8: at most ")
    assert len(found.lines) == 1


def test_with_less_memory_the_next_rung_is_taken_and_the_lines_say_what_did_not_fit(recipe, machine) -> None:
    machine(900)
    found = planned(recipe, 4)
    assert resolve(found.recipe.layout, 4).word == "zero1x4"
    assert found.lines[1].startswith("  ddp is tight: ddp4")
    machine(550)
    found = planned(recipe, 4)
    assert resolve(found.recipe.layout, 4).word == "zero1x2+tp2"
    assert found.lines[1].startswith("  ddp does not fit: ddp4")
    machine(200)
    found = planned(recipe, 4)
    assert resolve(found.recipe.layout, 4).word == "tp4"
    assert found.recipe.train.recompute == "full"
    assert "with full recompute" in found.lines[0]


def test_a_microbatch_that_does_not_fit_is_made_smaller_and_one_that_is_given_is_kept(recipe, machine) -> None:
    machine(100)
    found = planned(recipe, 4)
    assert found.recipe.batch.microbatch_size in (1, 2, 4)
    assert f"of {found.recipe.batch.microbatch_size}: at most" in found.lines[0]
    with pytest.raises(NoFeasibleLayout):
        planned(recipe, 4, "batch.microbatch_size=8")


def test_what_fits_nowhere_is_refused_with_what_would_fit(recipe, machine) -> None:
    machine(10)
    with pytest.raises(NoFeasibleLayout, match="Nearest: ") as refused:
        planned(recipe, 2)
    assert refused.value.exit_code == 3


def test_what_fits_and_is_not_run_yet_is_said(recipe, machine) -> None:
    machine(60)
    offloaded = "what fits is tp4 with its optimizer offloaded, which this version plans and does not run yet"
    with pytest.raises(NoFeasibleLayout, match=offloaded):
        planned(recipe, 4)


def test_a_batch_without_a_whole_solution_is_refused_as_ever(recipe) -> None:
    with pytest.raises(BatchError, match="32"):
        planned(recipe, 3)


@pytest.mark.parametrize(
    ("sets", "is_open"),
    [([], True), (["layout.dp_shard=2"], False), (["layout=single"], False), (["layout.zero_stage=0"], False)],
)
def test_a_layout_that_is_named_is_not_planned(recipe, sets, is_open) -> None:
    assert leaves_open(load(recipe, sets), 4) is is_open


def test_the_document_is_the_whole_plan(recipe) -> None:
    document = json.loads(json.dumps(planned(recipe, 2).document))
    assert document["chosen"]["layout"] == "ddp2"
    assert document["chosen"]["runs"] is True
    assert document["counts"]["considered"] >= document["counts"]["legal"] >= 1
