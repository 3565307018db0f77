"""The planner's count of collectives and of bytes, beside what ranks really do in a step."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.cost.candidate import Candidate
from meshwright.cost.closed_form import KERNELS, model_spec
from meshwright.cost.counts import counts
from meshwright.cost.quantities import Job
from meshwright.cost.traffic import AXES, traffic
from meshwright.plan.forecast import candidate_of, job_of_run
from meshwright.spec.catalogue import decoder_of_shape
from meshwright.spec.layout import parse_layout
from meshwright.spec.load import from_table
from meshwright.spec.shape import resolve_shape
from train.counting import collectives_of
from train.parity import SEQ_LEN
from train.spread_matrix import table_of

TOLERANCE = 0.03
"""The issue's own. What the formulas leave out: the all-reduces of the loss and of norms, and rows that pad a shard."""

CELLS = [
    ("tp2", "", "llama", "none", "dropout"),
    ("tp2", "", "gpt2", "full", "plain"),
    ("tp2", "", "llama tied", "selective", "dropout"),
    ("tp4", "", "llama", "none", "plain"),
    ("ddp2+tp2", "", "gpt2 tied", "none", "plain"),
    ("zero3x2+tp2", "", "llama", "full", "dropout"),
    ("hsdp2x2+tp2", "", "llama", "none", "dropout"),
    ("pp2", "gpipe", "llama", "selective", "dropout"),
    ("pp2", "1f1b", "llama tied", "none", "dropout"),
    ("pp2", "interleaved1f1b", "gpt2", "none", "plain"),
    ("pp2", "interleaved-zero-bubble", "llama", "none", "dropout"),
    ("pp2", "zbv", "gpt2 tied", "none", "dropout"),
    ("pp4", "1f1b", "llama tied", "none", "plain"),
    ("pp4", "zbv", "gpt2", "none", "plain"),
    ("ddp2+pp2", "1f1b", "gpt2", "none", "dropout"),
    ("zero1x2+pp2", "1f1b", "llama tied", "none", "dropout"),
    ("zero3x2+pp2", "gpipe", "llama", "none", "dropout"),
    ("zero3x2+pp2", "interleaved1f1b", "gpt2 tied", "full", "dropout"),
    ("hsdp2x2+pp2", "1f1b", "llama", "none", "plain"),
    ("tp2+pp2", "1f1b", "llama", "none", "dropout"),
    ("zero3x2+tp2+pp2", "1f1b", "gpt2 tied", "none", "dropout"),
]
SAMPLE = [cell for cell in CELLS if cell[0] in ("tp2", "ddp2+pp2") and cell[3] == "none"]


def priced(table: dict[str, Any], layout: str) -> tuple[Job, Candidate]:
    """What the planner counts by."""
    recipe, degrees = from_table(table), parse_layout(layout)
    decoder = decoder_of_shape(resolve_shape(recipe.model, SEQ_LEN, None))
    model = model_spec(decoder, seq_len=SEQ_LEN, compute="fp32", kernels=KERNELS["cpu"])
    return job_of_run(recipe, degrees, "cpu", model), candidate_of(recipe, degrees)


def small_table(layout: str, schedule: str, model: str, recompute: str, dropout: str) -> dict[str, Any]:
    table = table_of(layout, schedule, model, "fp32", exact=False)
    table["train"] |= {"recompute": recompute, "steps": 3}
    table["model"] |= {"n_layers": 9 if "pp4" in layout else 5, "dropout": 0.1 if dropout == "dropout" else 0.0}
    return table


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, marks=[] if c in SAMPLE else pytest.mark.matrix, id=" ".join(filter(None, c))) for c in CELLS],
)
def test_a_step_has_the_collectives_that_the_planner_counts(run_ranks, cell) -> None:
    table = small_table(*cell)
    job, one = priced(table, cell[0])
    ranks = run_ranks(one.world_size, collectives_of, table, limit_s=100.0)
    for place, found, few in ranks:
        calls = {axis: {kind: n for kind, (n, _) in kinds.items()} for axis, kinds in found.items()}
        assert calls == counts(job, one, place), few
        sent = {axis: sum(amount for _, amount in kinds.values()) for axis, kinds in found.items()}
        sent |= {"pipeline": sent.pop("ends", 0.0) + sent["pipeline"]} if one.pp > 1 else {}
        amounts = traffic(job, one, (place,)).by_axis
        expected = {axis: float(part[0]) for axis, part in zip(AXES, amounts, strict=True) if part[0]}
        print(place, {axis: f"{amount:,.0f}: {expected[axis] / amount - 1:+.2%}" for axis, amount in sent.items()})
        assert expected == pytest.approx(sent, rel=TOLERANCE)
