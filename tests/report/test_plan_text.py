"""The plan in words: the choice first, everything within 100 columns, numbers that are those of the plan."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from meshwright.plan.plan import Plan, Request, make_plan
from meshwright.report.plan_text import WIDTH, plan_lines
from plan.some_models import LLAMA_405B, cluster_of, dense, job_of


def plan_of(model=None, *, nodes: int = 1, devices: int = 8, gigabytes: float = 80.0, **changes: Any) -> Plan:
    job = job_of(model or dense(), gigabytes=gigabytes)
    return make_plan(Request(job=job, cluster=cluster_of(nodes, devices, gigabytes), **changes))


PLANS = {
    "one node": lambda: plan_of(),
    "four nodes": lambda: plan_of(nodes=4),
    "one device": lambda: plan_of(devices=1),
    "405B": lambda: plan_of(dense(**LLAMA_405B), nodes=2048, lines=("assumed: " + "a long line, " * 20,)),
    "nothing fits": lambda: plan_of(dense(**LLAMA_405B), nodes=2),
    "named": lambda: plan_of(layouts=("ddp8", "zero2x8", "tp3")),
    "asked": lambda: plan_of(asked="zero3x8"),
    "experts": lambda: plan_of(dense(n_experts=8), nodes=2),
}


@pytest.fixture(params=PLANS, scope="module")
def plan(request) -> Plan:
    return PLANS[request.param]()


def test_every_line_fits_a_terminal_and_ends_without_blanks(plan: Plan) -> None:
    lines = plan_lines(plan)
    assert all(len(line) <= WIDTH == 100 and line == line.rstrip() for line in lines)
    assert lines[-1] and not any(first == second == "" for first, second in pairwise(lines))


def test_the_choice_stands_in_the_first_line(plan: Plan) -> None:
    first = plan_lines(plan)[0]
    if plan.chosen:
        assert plan.chosen.word in first
    else:
        assert first.endswith("nothing fits")


def test_every_rung_and_every_rule_has_its_line(plan: Plan) -> None:
    text = "\n".join(plan_lines(plan))
    for rung in plan.ladder:
        assert f"\n  {rung.name:<16}{rung.fits}" in text
    for rule, number in plan.counts.rejected.items():
        assert f"\n  {rule:<18}{number:>9,}" in text
    assert f"{plan.counts.considered:,} combinations considered" in text


def test_a_terminal_without_blocks_gets_other_bars(plan: Plan) -> None:
    lines = plan_lines(plan, ascii_only=True)
    assert all(line.isascii() for line in lines)
    blocks = [line.replace("\N{FULL BLOCK}", "#") for line in plan_lines(plan)]
    assert lines == blocks


def test_bars_are_as_long_as_their_terms() -> None:
    plan = plan_of()
    assert plan.chosen is not None
    lines = plan_lines(plan)
    for term in plan.chosen.memory.terms:
        line = next(one for one in lines if one.startswith(f"  {term.name} "))
        assert f"{term.amount / 2**30:,.2f} GiB" in line
        assert line.count("\N{FULL BLOCK}") == round(40 * term.amount / 80e9)


def test_small_models_are_measured_in_mebibytes() -> None:
    tiny = dense(n_layers=1, d_model=64, n_heads=4, n_kv_heads=4, d_ff=128, vocab_size=100, seq_len=64)
    lines = plan_lines(plan_of(tiny, devices=1, gigabytes=16.0))
    term = next(line for line in lines if line.startswith("  parameters"))
    assert term.split()[1:] in (["0.00", "GiB"], [f"{tiny.num_parameters * 4 / 2**20:.2f}", "MiB"])


def test_a_choice_that_is_not_run_yet_is_said_to_be_planned() -> None:
    assert "does not run it yet" in "\n".join(plan_lines(plan_of(nodes=2, layouts=("zero3x8+cp2",))))
    assert "does not run it yet" not in "\n".join(plan_lines(plan_of(dense(**LLAMA_405B), nodes=2048)))
    assert "does not run it yet" not in "\n".join(plan_lines(plan_of()))


def test_the_layout_that_a_recipe_gives_has_a_line() -> None:
    assert any(line.startswith("  asked: zero3x8") for line in plan_lines(plan_of(asked="zero3x8")))
    assert any(line.startswith("  asked: tp3: tp 3 does not") for line in plan_lines(plan_of(asked="tp3")))
