"""The same training on 1, 2 and 3 processes: contract by contract, over 30 steps."""

from __future__ import annotations

import pytest

from train.parity import MODELS, OPTIMIZERS, joined_ids, largest_distances, recipe_table, train

FP64_BOUND = 1e-11
"""Sums of 12 microbatches in another order round differently by about 1e-16 a sum; 30 steps let that grow."""

FP32_BOUND = {
    # One fp32 rounding is 6e-8 of a number's size. A gradient is a sum over 6 microbatches of up to 48 labels, cut at 1
    # to 3 places: some roundings of its largest terms, 1e-6 of the model-wide maximum. Seen: gradient 1e-6, rest 5e-7.
    "sgd": {"loss": 1e-6, "norm": 2e-6, "gradient": 1e-5, "weight": 1e-6},
    # Adam divides by the gradient's own size: where the true gradient is near zero, rounding noise decides the
    # direction of steps of up to lr = 3e-3, and the loss does not see it. Seen: weight 7e-6, the rest as above.
    "adamw": {"loss": 1e-6, "norm": 2e-6, "gradient": 1e-5, "weight": 1e-3},
}

CASES = [(model, compute, optimizer) for model in MODELS for compute in ("fp64", "fp32") for optimizer in OPTIMIZERS]
SAMPLE = [("llama", "fp64", "adamw"), ("gpt2", "fp32", "sgd")]
"""Each value stands in one of them; `make matrix` runs all, and test_matrix.py has each pair over fewer steps."""


@pytest.mark.parametrize(
    ("model", "compute", "optimizer"),
    [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.matrix) for case in CASES],
)
def test_one_two_and_three_processes_train_the_same(run_ranks, model, compute, optimizer) -> None:
    table = recipe_table(model, compute, optimizer)
    (single,) = run_ranks(1, train, table)
    for n in (2, 3):
        ranks = run_ranks(n, train, table)
        assert joined_ids(ranks) == single.ids
        for record in ranks:
            assert record.rates == single.rates
            assert record.losses == ranks[0].losses
            far = largest_distances(record, single)
            bound = dict.fromkeys(far, FP64_BOUND) if compute == "fp64" else FP32_BOUND[optimizer]
            assert all(far[name] <= bound[name] for name in far), f"ddp{n}: {far} against {bound}"
