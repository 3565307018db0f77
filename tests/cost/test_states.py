"""Model states: the textbook's table, the ZeRO paper's, Megatron's, to the printed digit."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from meshwright.cost.candidate import Candidate
from meshwright.cost.engine import own_engine
from meshwright.cost.quantities import Job, StageQuantities
from meshwright.cost.states import STATES, StateRecipe, find_states
from meshwright.cost.terms import moment_terms
from meshwright.errors import SpecError
from meshwright.spec.model_spec import Bytes, ModelSpec, UnitSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "zero_model_states.csv"
GB = 1e9


def bare(parameters: int) -> ModelSpec:
    """A model of which nothing but the number of its parameters is known."""
    return ModelSpec(
        name="bare", units=(), other_parameters=parameters, d_model=1, vocab_size=1, seq_len=1, compute="bf16"
    )


def states_of(parameters: float, states: StateRecipe, **degrees: int) -> dict[str, float]:
    job = Job(
        model=bare(int(parameters)), global_batch_size=1, states=states, engine=own_engine(2), capacity_bytes=80 << 30
    )
    terms = moment_terms(StageQuantities(job, Candidate(sync_every=1, **degrees), "first"))["update"]
    return {name: float(terms[name]) for name in ("parameters", "gradients", "optimizer_state")}


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32, 64])
def test_textbook_table(n):
    """7 billion parameters, Adam, 16-bit weights and gradients, fp32 moments (DESIGN, section 1)."""
    table = {
        0: (14 * GB, 14 * GB, 56 * GB),
        1: (14 * GB, 14 * GB, 56 * GB / n),
        2: (14 * GB, 14 * GB / n, 56 * GB / n),
        3: (14 * GB / n, 14 * GB / n, 56 * GB / n),
    }
    for stage, expected in table.items():
        degrees = {"dp_replicate": n} if stage == 0 else {"dp_shard": n, "zero_stage": stage}
        assert tuple(states_of(7e9, STATES["textbook"], **degrees).values()) == expected


def test_textbook_sums():
    assert sum(states_of(7e9, STATES["textbook"], dp_replicate=8).values()) == 84 * GB
    assert sum(states_of(7e9, STATES["textbook"], dp_shard=8, zero_stage=3).values()) == 10.5 * GB


def _rows() -> list[dict[str, str]]:
    with GOLDEN.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


STAGES = {"baseline": 0, "Pos": 1, "Pos+g": 2, "Pos+g+p": 3}


@pytest.mark.parametrize("row", [row for row in _rows() if row["exact_gb_per_device"]], ids=lambda row: row["id"])
def test_zero_paper(row):
    n, stage = int(row["dp_degree"]), STAGES[row["stage"]]
    degrees = {"dp_replicate": n} if stage == 0 else {"dp_shard": n, "zero_stage": stage}
    total = sum(states_of(float(row["params_b"]) * 1e9, STATES["zero-paper"], **degrees).values()) / GB
    printed = row["exact_gb_per_device"]
    assert float(f"{total:.6g}") == float(printed), "six digits are printed"


@pytest.mark.parametrize("row", [row for row in _rows() if row["published_max_params_b"]], ids=lambda row: row["id"])
def test_largest_model_of_the_zero_paper(row):
    """Table 2: 32 GB devices, model states alone; as many parameters as fit, to the digits that the paper prints."""
    mp, n, stage = int(row["mp_degree"]), int(row["dp_degree"]), STAGES[row["stage"]]
    degrees = {"dp_replicate": n} if stage == 0 else {"dp_shard": n, "zero_stage": stage}
    one = sum(states_of(1e9, STATES["zero-paper"], **degrees).values())
    fits_b = 32e9 * mp / one
    published = float(row["published_max_params_b"])
    assert fits_b == pytest.approx(published, rel=0.03), "the paper rounds, and once (128 B for mp 2: 256) doubles it"


@pytest.mark.parametrize(
    ("name", "total", "whole", "cut"), [("megatron-fp16", 20, 4, 16), ("megatron", 18, 6, 12), ("fp32", 16, 8, 8)]
)
def test_megatron_bytes_per_parameter(name, total, whole, cut):
    """Rows zero-079 to zero-084: without and with the distributed optimizer, which is ZeRO-1."""
    assert sum(states_of(1e9, STATES[name], dp_replicate=8).values()) == total * GB
    assert sum(states_of(1e9, STATES[name], dp_shard=8, zero_stage=1).values()) == whole * GB + cut * GB / 8


def test_fsdp2_cuts_its_masters_at_every_stage():
    for stage in (1, 2, 3):
        assert states_of(8e9, STATES["fsdp2"], dp_shard=8, zero_stage=stage)["parameters"] == 4 * GB


def test_b110_whole_gradients_while_accumulating_cost_what_was_measured():
    """26B on 16 GPUs, bf16 gradients: cut after each microbatch 3.25 GB, kept whole until the last 52 GB."""
    job = Job(
        model=bare(26_000_000_000), global_batch_size=1, states=STATES["zero-paper"], engine=own_engine(2),
        capacity_bytes=80 << 30,
    )  # fmt: skip
    held = {}
    for sync_every in (0, 1):
        candidate = Candidate(dp_shard=16, zero_stage=3, num_microbatches=4, sync_every=sync_every)
        held[sync_every] = float(moment_terms(StageQuantities(job, candidate, "first"))["forward"]["gradients"])
    assert held == {0: 52 * GB, 1: 3.25 * GB}


def test_b112_frozen_weights_keep_their_type_and_have_no_optimizer_state():
    """1000 frozen bf16 weights and 10 trained in fp32: 2 x 1000 + 10 x (4 + 4 + 8) bytes."""
    from dataclasses import replace

    unit = UnitSpec(name="lora", count=1, parameters=1010, frozen=1000, saved={"none": Bytes()})
    model = ModelSpec(name="lora", units=(unit,), d_model=1, vocab_size=1, seq_len=1, compute="bf16")
    states = replace(STATES["fp32"], frozen_bytes=2)
    job = Job(model=model, global_batch_size=1, states=states, engine=own_engine(2), capacity_bytes=1 << 30)
    terms = moment_terms(StageQuantities(job, Candidate(), "first"))["update"]
    assert sum(float(terms[name]) for name in ("parameters", "gradients", "optimizer_state")) == 2000 + 10 * 16


def test_an_unknown_recipe_is_refused_with_the_nearest():
    with pytest.raises(SpecError, match="Nearest: zero-paper"):
        find_states("zero_paper")
