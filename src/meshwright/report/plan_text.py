"""A plan in words, for a terminal of 100 columns: the choice, its memory as bars, the ladder, what else there was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from meshwright.cost.candidate import RECOMPUTE, SCHEDULES
from meshwright.plan.ladder import bought
from meshwright.plan.option import GIB, Option, Rejection, Rung, gib
from meshwright.plan.plan import Plan

WIDTH: Final = 100
BAR: Final = 40
RUNNERS_UP: Final = 5


def plan_lines(plan: Plan, *, ascii_only: bool = False) -> list[str]:
    """The plan, a line each.

    Args:
        plan: what was planned.
        ascii_only: bars of `#`, for a terminal that has no blocks.
    """
    parts = [
        _heading(plan),
        _memory(plan, "#" if ascii_only else "\N{FULL BLOCK}"),
        _ladder(plan),
        _runners_up(plan),
        _rejected(plan),
        _advice(plan),
    ]
    lines = [[*part, ""] for part in ([*part] for part in parts) if part]
    return [line for part in lines for line in part][:-1]


def described(option: Option) -> str:
    """A candidate with all its knobs: `zero3x8, microbatch_size 2, 64 microbatches, full recompute`."""
    one = option.candidate
    many = f"{one.num_microbatches:,} microbatch{'es' if one.num_microbatches > 1 else ''} of {one.microbatch_size}"
    parts = [option.word, many]
    if one.pp > 1:
        parts.append(SCHEDULES[one.schedule] + (f" with {one.chunks} chunks a stage" if one.chunks > 1 else ""))
    if one.recompute:
        parts.append(f"{RECOMPUTE[one.recompute]} recompute")
    if one.offload:
        parts.append("optimizer state offloaded")
    if one.sync_every != (one.zero_stage >= 2) and one.num_microbatches > 1:
        parts.append(f"sync {'every' if one.sync_every else 'last'}")
    return ", ".join(parts)


def needs(option: Option) -> str:
    """Predicted memory: `needs 58.9 GiB, with a fragmented allocator 66.4 GiB, of 74.5 GiB: it fits`."""
    memory = option.memory
    verdict = {"yes": "it fits", "tight": "tight", "no": "it does not fit"}[memory.fits]
    upper = f"with a fragmented allocator {gib(memory.reserved_bytes)}"
    return f"needs {gib(memory.total_bytes)}, {upper}, of {gib(memory.capacity_bytes)}: {verdict}"


def _heading(plan: Plan) -> Iterator[str]:
    request, model = plan.request, plan.request.job.model
    states = request.job.states
    title = f"{model.name} on {request.cluster.name}"
    yield from _hanging("", f"{title}: {described(plan.chosen)}" if plan.chosen else f"{title}: nothing fits")
    parameters = f"{model.num_parameters:,} parameters"
    yield from _wrapped("model", f"{model.name}, {parameters}, seq_len {request.job.seq_len:,}, {model.compute}")
    sources = "; ".join(dict.fromkeys(source for source in (request.origin, model.source) if source))
    yield from _wrapped("", ("low confidence: " if model.confidence == "low" else "from: ") + sources)
    per_parameter = (states.parameter_bytes, states.gradient_bytes, states.optimizer_bytes)
    sums = " + ".join(f"{amount:g}" for amount in per_parameter)
    yield from _wrapped("states", f"{states.name}: {sums} bytes a parameter (weights, gradients, optimizer)")
    device = request.cluster.device
    total = f"{request.cluster.num_devices:,} x {device.name or device.key or 'device'}"
    yield from _wrapped("cluster", f"{total}, {gib(device.memory_bytes)} each")
    for line in plan.advice.lines:
        name, colon, text = line.partition(": ")
        yield from _wrapped(name, text) if colon and len(name) < 14 else _wrapped("", line)
    if plan.chosen and not plan.chosen.runs:
        other = plan.runnable
        best = f"; what it runs: {described(other)}: {gib(other.reserved_bytes)} {other.fits}" if other else ""
        yield from _wrapped("note", f"this version plans {plan.chosen.word}, and does not run it yet{best}")


def _memory(plan: Plan, block: str) -> Iterator[str]:
    option = plan.chosen or next((rung.option for rung in reversed(plan.ladder) if rung.option), None)
    if option is None:
        return
    memory = option.memory
    yield from _hanging("", f"memory of the fullest rank of {option.phrase}, {memory.moment}")
    largest = max(term.amount for term in memory.terms) or 1.0
    for term in memory.terms:
        bar = block * round(BAR * term.amount / max(largest, memory.capacity_bytes))
        yield f"  {term.name:<20}{_in_unit(term.amount, memory.total_bytes):>14}  {bar}".rstrip()
    sums = {"total": f"of {gib(memory.capacity_bytes)}", "at most reserved": memory.fits}
    for name, amount in zip(sums, (memory.total_bytes, memory.reserved_bytes), strict=True):
        yield f"  {name:<20}{_in_unit(amount, memory.total_bytes):>14}  {sums[name]}"


def _in_unit(amount: float, whole: float) -> str:
    """Terms of one sum in one unit."""
    unit, word = (GIB, "GiB") if whole >= GIB else (2**20, "MiB")
    return f"{amount / unit:,.2f} {word}"


def _ladder(plan: Plan) -> Iterator[str]:
    yield "the rule, rung by rung"
    for rung in plan.ladder:
        yield from _rung_lines(rung)


def _rung_lines(rung: Rung) -> Iterator[str]:
    head = f"  {rung.name:<16}{rung.fits:<7}"
    text = rung.because if rung.fits == "yes" or not rung.fix else f"{rung.because} {_fix(rung)}"
    yield from _hanging(head, text)


def _fix(rung: Rung) -> str:
    return rung.fix if rung.fix.startswith("Nearest") else f"Fits: {rung.fix}"


def _runners_up(plan: Plan) -> Iterator[str]:
    others = [option for option in plan.candidates if option is not plan.chosen]
    named = bool(plan.request.layouts)
    shown = others if named else _unlike(others)[:RUNNERS_UP]
    if not shown:
        return
    yield "the other named layouts" if named else "runners-up"
    for option in shown:
        sent = sum(term.amount for term in option.sent)
        planned = "" if option.runs else "  planned"
        memory = f"{gib(option.reserved_bytes)} {option.fits}"
        yield from _hanging("  ", f"{described(option)}: {memory}, sends {gib(sent)} a step{planned}")


def _unlike(options: Sequence[Option]) -> list[Option]:
    """The best of each kind: those that differ in the split of the data-parallel ranks alone are one."""
    kinds: dict[tuple[int, ...], Option] = {}
    for option in options:
        one = option.candidate
        stage = one.zero_stage if one.tp == one.pp == 1 else min(one.zero_stage, 1)
        kinds.setdefault((one.tp, one.pp, one.cp, one.ep, stage, one.recompute, one.offload), option)
    return list(kinds.values())


def _rejected(plan: Plan) -> Iterator[str]:
    counts = plan.counts
    yield f"{counts.considered:,} combinations considered: {counts.legal:,} legal, {counts.fitting:,} fit"
    if isinstance(plan.asked, Rejection):
        yield from _hanging("  asked: ", f"{plan.asked.layout}: {plan.asked.because} {plan.asked.nearest}")
    elif plan.asked is not None:
        yield from _hanging("  asked: ", f"{described(plan.asked)}: {needs(plan.asked)}")
    first = {one.rule: one for one in reversed(plan.rejections)}
    for rule, number in counts.rejected.items():
        one = first.get(rule)
        text = f"{one.layout}: {_sentence(one)}" if one else ""
        yield from _hanging(f"  {rule:<18}{number:>9,}  ", text)


def _sentence(one: Rejection) -> str:
    """Why, without repeating the layout that stands before it."""
    because = one.because.removeprefix(f"{one.layout} ")
    return f"{because} {one.nearest}"


def _advice(plan: Plan) -> Iterator[str]:
    advice, chosen = plan.advice, plan.chosen
    if advice.purchase:
        yield from _hanging("fewest devices that fit: ", bought(advice.purchase))
    if chosen and advice.largest_microbatch:
        text = f"microbatch_size {advice.largest_microbatch:,}"
        if advice.largest_seq_len:
            text += f", or seq_len {advice.largest_seq_len:,}"
        yield from _hanging("", f"{chosen.phrase} has room for: {text}")


def _wrapped(name: str, text: str) -> Iterator[str]:
    return _hanging(f"  {name:<14}", text)


def _hanging(head: str, text: str) -> Iterator[str]:
    """Text after a head, its further lines below its first."""
    lines = _folded(text, WIDTH - len(head))
    yield f"{head}{lines[0]}".rstrip()
    yield from (f"{'':<{len(head)}}{line}" for line in lines[1:])


def _folded(text: str, width: int) -> Sequence[str]:
    import textwrap  # Only printing needs it.

    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
