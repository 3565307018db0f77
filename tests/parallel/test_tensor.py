"""A model cut over tp ranks trains as the whole one does: losses, gradients and weights."""

from __future__ import annotations

import pytest

from parallel.tensor_runs import reference_beside

EXACT = 1e-11
"""Of the model-wide maximum, in fp64: sums of some hundred terms in another order differ by 1e-14."""


def compare(world, name, keys):
    return reference_beside(world, name, **keys)


CASES = [
    ("llama", dict(tied=False)),
    ("llama", dict(tied=True, dropout=0.1)),
    ("llama", dict(tied=True, dropout=0.1, recompute="full")),
    ("llama", dict(tied=False, dropout=0.1, recompute="selective")),
    ("llama", dict(tied=False, loss_parallel=False)),
    ("llama", dict(tied=True, n_kv_heads=8)),
    ("llama", dict(tied=True, n_kv_heads=1, dropout=0.1)),
    ("gpt2", dict(tied=True)),
    ("gpt2", dict(tied=False, dropout=0.1)),
    ("gpt2", dict(tied=True, dropout=0.1, recompute="full")),
    ("gpt2", dict(tied=True, dropout=0.1, recompute="selective", loss_parallel=False)),
]


def named(case) -> str:
    name, keys = case
    return name + "".join(f" {key}={value}" for key, value in keys.items())


SAMPLE = {(1, 2), (3, 4), (6, 4), (10, 2)}
"""Each model, each degree, tied and not, shared heads, each way to recompute; the rest runs in `make matrix`."""


@pytest.mark.parametrize(
    ("case", "tp"),
    [
        pytest.param(case, tp, marks=[] if (i, tp) in SAMPLE else pytest.mark.matrix, id=f"{named(case)} tp{tp}")
        for i, case in enumerate(CASES)
        for tp in (2, 4)
    ],
)
def test_three_steps_equal_those_of_the_whole_model_in_fp64(run_ranks, tp, case) -> None:
    for apart in run_ranks(tp, compare, *case):
        assert max(apart.values()) < EXACT, apart
