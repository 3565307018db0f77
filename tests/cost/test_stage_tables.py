"""What the ranks of a pipeline hold: the cut that the run makes, tied tables, shared heads, uneven parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost.candidate import SCHEDULES, Candidate
from meshwright.cost.closed_form import KERNELS, model_spec
from meshwright.cost.engine import Engine, own_engine
from meshwright.cost.memory import estimate
from meshwright.cost.quantities import Job, StageQuantities
from meshwright.cost.run_moments import run_moments
from meshwright.cost.stages import spans_of_ranks, weights_of
from meshwright.cost.states import STATES
from meshwright.cost.terms import parameter_bytes
from meshwright.spec.catalogue import decoder_of_shape, find_model
from meshwright.spec.model_spec import ModelSpec
from meshwright.spec.sections import ModelSection
from meshwright.spec.shape import resolve_shape
from meshwright.spec.stage_cut import stages_of, weigh
from meshwright.spec.tensor_rules import local_elements, reference_rules


def job_of(model: ModelSpec, engine: Engine | None = None) -> Job:
    return Job(
        model=model, global_batch_size=64, states=STATES["fp32"], engine=engine or own_engine(4),
        capacity_bytes=80 << 30,
    )  # fmt: skip


def reference(name: str = "llama", **keys: object) -> ModelSpec:
    section = ModelSection(name=name, **({"n_layers": 7, "d_model": 96, "n_heads": 6, "vocab_size": 261} | keys))
    return model_spec(
        decoder_of_shape(resolve_shape(section, 32, 261)), seq_len=32, compute="fp32", kernels=KERNELS["cpu"]
    )


@pytest.mark.parametrize("name", ["gpt2", "llama-3.1-8b", "llama-3.1-405b", "deepseek-v3"])
@pytest.mark.parametrize(
    ("pp", "chunks", "schedule"), [(2, 1, "1f1b"), (4, 1, "gpipe"), (3, 2, "zbv"), (2, 3, "interleaved1f1b")]
)
def test_every_rank_holds_the_layers_that_the_run_gives_it(name: str, pp: int, chunks: int, schedule: str) -> None:
    model = model_spec(find_model(name), seq_len=1024, compute="bf16", kernels=KERNELS["cuda"])
    layers = [unit.parameters for unit in model.units for _ in range(unit.count)]
    spans = weigh(layers, model.embedding_parameters, model.head_parameters, model.tied).cut(pp * chunks)
    one = Candidate(pp=pp, chunks=chunks, schedule=SCHEDULES.index(schedule), num_microbatches=12)
    for rank in range(pp):
        held = [layer for stage in stages_of(rank, pp, chunks, schedule) for layer in spans[stage]]
        content = StageQuantities(job_of(model), one, rank).content
        assert int(content.layers) == len(held)
        assert int(content.parameters) == sum(layers[layer] for layer in held)


def test_all_ranks_together_hold_the_model_once_and_a_tied_table_twice() -> None:
    for tied in (False, True):
        model = reference(tied_embeddings=tied)
        held = sum(
            float(StageQuantities(job_of(model), Candidate(pp=4, num_microbatches=8), rank).parameters)
            for rank in range(4)
        )
        assert held == model.num_parameters + tied * model.embedding_parameters


def test_the_second_copy_of_a_table_on_one_rank_is_weights_alone() -> None:
    model = reference(tied_embeddings=True)
    v = Candidate(pp=2, chunks=2, schedule=SCHEDULES.index("zbv"), num_microbatches=8)
    q = StageQuantities(job_of(model), v, 0)
    assert float(q.twin) == model.embedding_parameters
    assert float(parameter_bytes(q)) == 4 * (float(q.parameters) + model.embedding_parameters)
    assert float(StageQuantities(job_of(model), v, 1).twin) == 0
    assert float(StageQuantities(job_of(model), Candidate(pp=2, num_microbatches=8), 0).twin) == 0
    assert float(StageQuantities(job_of(reference()), v, 0).twin) == 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("tp", [2, 3, 6])
def test_the_fullest_tp_rank_has_what_the_table_of_the_runner_gives_it(name: str, tp: int) -> None:
    """Odd vocabulary, odd hidden units, and for llama fewer key and value heads than ranks."""
    kv = 6 if name == "gpt2" else {2: 2, 3: 3, 6: 2}[tp]
    more = {} if name == "gpt2" else {"n_kv_heads": kv}
    model = reference(name, d_ff=257, tied_embeddings=False, **more)
    rules, d, h = reference_rules(name, 6, kv), 96, 16
    bias = name == "gpt2"
    shapes = {"query": (6 * h, d), "key": (kv * h, d), "value": (kv * h, d), "out": (d, 6 * h)}
    matrices = {f"blocks.0.attention.{key}.weight": shape for key, shape in shapes.items()}
    matrices |= {"blocks.0.feed_forward.up.weight": (257, d), "blocks.0.feed_forward.down.weight": (d, 257)}
    matrices |= {} if bias else {"blocks.0.feed_forward.gate.weight": (257, d)}
    exact = 7 * sum(local_elements(rules, key, shape, tp) for key, shape in matrices.items())
    exact += 2 * local_elements(rules, "embedding.weight", (261, d), tp)
    found = float(StageQuantities(job_of(model), Candidate(tp=tp), 0).parameters)
    vectors = 7 * (2 * d * (1 + bias) + bias * (6 * h + 2 * kv * h + d + 257 + d)) + d * (1 + bias) + bias * 32 * d
    assert exact < found <= exact + vectors  # norms, biases and positions, whole or cut


def test_other_programs_count_layers() -> None:
    model = reference(n_layers=8, vocab_size=50_000)
    assert [sum(map(len, mine)) for mine in spans_of_ranks(weights_of(model, by_cost=False), 4, 1, False)] == [
        2,
        2,
        2,
        2,
    ]
    assert [sum(map(len, mine)) for mine in spans_of_ranks(weights_of(model), 4, 1, False)] == [2, 2, 3, 1]
    uneven = reference(n_layers=6)
    assert [sum(map(len, mine)) for mine in spans_of_ranks(weights_of(uneven, by_cost=False), 4, 1, False)] == [
        1,
        2,
        2,
        1,
    ]


def test_the_fullest_rank_of_a_run_is_one_of_its_ranks() -> None:
    job = job_of(reference())
    one = Candidate(pp=4, dp_shard=2, zero_stage=2, num_microbatches=8, microbatch_size=2)
    ranks = [run_moments(job, one, rank) for rank in range(4)]
    for moment, row in run_moments(job, one).items():
        assert sum(row.values()) == max(sum(rank[moment].values()) for rank in ranks)


def test_replicas_of_a_v_are_priced_as_those_of_other_pipelines() -> None:
    model = replace(reference(), seq_len=32)
    v = Candidate(pp=2, dp_replicate=2, chunks=2, schedule=SCHEDULES.index("zbv"), num_microbatches=8)
    assert float(estimate(job_of(model), v).total_bytes[0]) > 0
