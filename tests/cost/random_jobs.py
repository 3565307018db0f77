"""Random models, devices and layouts, legal and strange, for properties that hold of all."""

from __future__ import annotations

import random

from meshwright.cost.candidate import SCHEDULES, Candidate
from meshwright.cost.engine import own_engine
from meshwright.cost.quantities import Job
from meshwright.cost.states import STATES
from meshwright.spec.model_spec import Bytes, ModelSpec, UnitSpec


def random_bytes(draw: random.Random, most: float) -> Bytes:
    return Bytes(
        fixed=draw.choice([0.0, draw.uniform(0, 1e6)]),
        inner=draw.uniform(0, most),
        residual=draw.uniform(0, most),
        normed=draw.uniform(0, most),
    )


def random_saved(draw: random.Random) -> dict[str, Bytes]:
    """Recompute keeps a part of what none keeps, of every kind."""
    whole = random_bytes(draw, 1e6)
    shares = {"none": 1.0, "selective": draw.random(), "full": 0.1 * draw.random()}
    return {
        mode: Bytes(**{name: share * getattr(whole, name) for name in ("fixed", "inner", "residual", "normed")})
        for mode, share in shares.items()
    }


def random_unit(draw: random.Random) -> UnitSpec:
    parameters = draw.randint(1, 10**9)
    expert = draw.choice([0, draw.randint(0, parameters)])
    replicated = draw.randint(0, parameters - expert)
    return UnitSpec(
        name="layer",
        count=draw.randint(1, 40),
        parameters=parameters,
        expert=expert,
        replicated=replicated,
        frozen=draw.choice([0, draw.randint(0, parameters - expert)]),
        largest=draw.randint(0, parameters),
        saved=random_saved(draw),
        forward_peak=random_bytes(draw, 1e5),
        backward_peak=random_bytes(draw, 1e5),
    )


def random_model(draw: random.Random) -> ModelSpec:
    embedding, tied = draw.choice([0, draw.randint(1, 10**9)]), draw.random() < 0.5
    return ModelSpec(
        name="random",
        units=tuple(random_unit(draw) for _ in range(draw.randint(0, 3))),
        embedding_parameters=embedding,
        head_parameters=0 if tied else draw.randint(0, 10**9),
        other_parameters=draw.randint(0, 10**6),
        tied=tied,
        before=Bytes(residual=16.0),
        after=random_bytes(draw, 1e5),
        loss_kept=random_bytes(draw, 1e6),
        loss_forward=random_bytes(draw, 1e6),
        loss_peak=random_bytes(draw, 1e6),
        d_model=draw.randint(1, 20000),
        vocab_size=draw.randint(1, 300_000),
        n_heads=draw.randint(1, 128),
        n_kv_heads=draw.randint(1, 128),
        n_experts=draw.choice([0, 8, 128]),
        seq_len=draw.choice([1, 7, 128, 4096, 131072]),
        compute=draw.choice(["fp32", "bf16"]),
    )


def random_job(draw: random.Random) -> Job:
    return Job(
        model=random_model(draw),
        global_batch_size=draw.randint(1, 4096),
        states=STATES[draw.choice(sorted(STATES))],
        engine=own_engine(draw.choice([2, 4, 8]), exact=draw.random() < 0.2),
        capacity_bytes=draw.choice([1, 16, 80, 192]) << 30,
    )


def random_candidate(draw: random.Random) -> Candidate:
    dp_shard = draw.choice([1, 2, 3, 8, 64])
    pp, schedule = draw.choice([1, 2, 4, 7]), draw.randint(0, 4)
    chunks = 2 if SCHEDULES[schedule] == "zbv" else draw.choice([1, 2, 3])
    return Candidate(
        dp_replicate=draw.choice([1, 2, 5]),
        dp_shard=dp_shard,
        zero_stage=draw.randint(1, 3) if dp_shard > 1 else 0,
        tp=draw.choice([1, 2, 8]),
        pp=pp,
        cp=draw.choice([1, 1, 2]),
        ep=draw.choice([1, 1, 2, 8]),
        chunks=chunks if pp > 1 else 1,
        schedule=schedule,
        microbatch_size=draw.choice([1, 2, 16]),
        num_microbatches=draw.choice([1, 3, 64]),
        recompute=draw.randint(0, 2),
        offload=draw.choice([0, 0, 1]),
        sync_every=draw.randint(0, 1),
    )
