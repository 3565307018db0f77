"""A recipe and a cluster as a request: what is priced, what is fixed, and what is left to the search."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.errors import SpecError
from meshwright.plan.space import Knobs
from meshwright.plan.workload import request_of
from meshwright.spec.catalogue import decoder_of_shape, find_model
from meshwright.spec.load import loads
from meshwright.spec.shape import resolve_shape
from plan.some_models import cluster_of, dense

TEXT = """
[model]
name = "llama"
[data]
seq_len = 64
[batch]
global_batch_size = 64
[optimizer]
lr = 1e-3
[train]
steps = 10
"""


def request_for(*overrides: str, given: tuple[str, ...] = (), cluster=None, **options):
    recipe = loads(TEXT, overrides)
    model = decoder_of_shape(resolve_shape(recipe.model, recipe.data.seq_len, 256))
    return request_of(recipe, cluster or cluster_of(1), model, given=given, **options)


def test_the_job_is_the_recipes() -> None:
    job = request_for("precision.compute=bf16").job
    assert (job.global_batch_size, job.seq_len, job.model.compute) == (64, 64, "bf16")
    assert job.capacity_bytes == 80_000_000_000 and job.states.total_bytes == 16
    assert job.engine.compute_bytes == 2


def test_exact_sums_and_other_optimizers_change_the_byte_recipe() -> None:
    assert request_for("train.reduction=exact").job.states.gradient_bytes == 8
    assert request_for("train.reduction=exact").job.engine.reduce_bytes == 8
    assert request_for("optimizer.name=sgd").job.states.optimizer_bytes == 0


def test_only_what_the_user_wrote_is_fixed() -> None:
    assert request_for().knobs == Knobs()
    wrote = ("train.recompute", "layout.pp_schedule")
    fixed = request_for("batch.microbatch_size=4", "train.sync=last", given=wrote).knobs
    assert fixed == Knobs(microbatch_size=4, recompute="none", sync="last", schedule="1f1b")


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        ((), ""),
        (("layout.dp_replicate=2",), "ddp2"),
        (("layout.dp_shard=4",), "hsdp2x4"),
        (("layout.dp_shard=16",), "zero3x16"),
        (("layout.pp=2",), "ddp4+pp2"),
    ],
)
def test_the_layout_that_a_recipe_gives_is_asked_for(overrides: tuple[str, ...], asked: str) -> None:
    assert request_for(*overrides).asked == asked
    assert request_for(*overrides, layouts=("ddp8",)).asked == ""


def test_an_optimizer_of_whole_matrices_is_not_cut() -> None:
    assert request_for().cuttable and not request_for("optimizer.name=adafactor").cuttable
    assert request_for("optimizer.name=adafactor").optimizer == "adafactor"


def test_the_learning_rate_has_a_line_where_the_batch_is_not_the_tuned_one() -> None:
    lines = request_for("batch.tuned_global_batch_size=32", "optimizer.lr_scaling=linear", lines=("more",)).lines
    assert lines[0].startswith("learning rate: lr 0.001 -> 0.002 (lr_scaling linear, x2)") and lines[1] == "more"
    assert request_for().lines == ()


def test_a_sequence_beyond_what_the_model_was_made_for_has_a_line() -> None:
    recipe = loads(TEXT, ["data.seq_len=8192"])
    lines = request_of(recipe, cluster_of(1), find_model("llama-2-7b")).lines
    assert lines == ("length: seq_len 8,192 is beyond the 4,096 that the model was made for",)


def test_processes_of_a_machine_have_an_engine_of_their_own() -> None:
    cluster = cluster_of(1)
    cpu = replace(cluster, device=replace(cluster.device, kind="cpu"))
    assert request_for(cluster=cpu).job.engine != request_for().job.engine


def test_a_trace_is_priced_as_it_is() -> None:
    recipe, traced = loads(TEXT), dense(seq_len=64)
    request = request_of(recipe, cluster_of(1), traced)
    assert request.job.model is traced and request.model_at is None


def test_a_sequence_beyond_learned_positions_is_refused() -> None:
    recipe = loads(TEXT, ["data.seq_len=2048"])
    with pytest.raises(SpecError, match="gpt2 has 1024 learned positions"):
        request_of(recipe, cluster_of(1), find_model("gpt2"))
