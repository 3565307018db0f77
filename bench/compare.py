"""meshwright beside a hand-written loop, as ratios. `make bench` runs it.

Both train recipe.toml on the same samples from the same weights, in each layout: meshwright as `meshwright train`,
recording as always; the hand-written loop, with DDP or FSDP2, under torchrun. Rounds are interleaved, A B, B A, ..., so
that what else the machine does falls on both; each round gives one ratio, and the median over the rounds is the result.
Both are watched from outside in the same way (observe.py):

    CPU per token       user + system time of all threads of all ranks, between the line of step --skip in
                        metrics.jsonl and that of the last step but two, over the tokens of those steps
    first step          from the start of the command to the first line of metrics.jsonl
    peak memory         VmHWM of each rank over its whole life; pages that forked ranks share count in each

Where other programs run, times on the wall are no fair race: torchrun makes each rank a session of its own, and Linux
(sched_autogroup) shares cores out to sessions. --fork adds the hand-written loop in a single session.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from observe import Observation, observe
from sides import HERE, Command, hand, hand_forked, layouts_of, meshwright, tokens_per_step

from meshwright.spec.layout import Layout

LAYOUTS: Final = "ddp2,zero3x2"
LOSS_TOLERANCE: Final = 1e-4
"""Both sides add the same fp32 numbers, in other orders: over 30 steps that moved a loss of 2.9 by 1e-6. What makes
it another training moves it further: no weight decay by 1e-3; a microbatch, clipping or a warm-up step less by 1e-1.
"""

ROWS: Final = (
    ("cpu_us", "CPU per token, ranks", "us", 1),
    ("all_cpu_us", "CPU per token, with launcher", "us", 1),
    ("tokens_per_s", "tokens per second", "", 0),
    ("first_step_s", "time to the first step", "s", 2),
    ("start_cpu_s", "CPU until the first step", "s", 2),
    ("peak_max_mib", "peak memory, largest rank", "MiB", 0),
    ("peak_sum_mib", "peak memory, all ranks", "MiB", 0),
)

Round = dict[str, Observation]
SIDES: Final[dict[str, Command]] = {"meshwright": meshwright, "hand": hand, "hand-forked": hand_forked}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rounds in one layout."""

    layout: Layout
    rounds: list[Round]

    @property
    def difference(self) -> float:
        """The largest one between last losses."""
        return max(abs(seen.loss - r["meshwright"].loss) for r in self.rounds for seen in r.values())

    @property
    def same(self) -> bool:
        """Is it the same training on all sides?"""
        return self.difference <= LOSS_TOLERANCE


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    load = os.getloadavg()[0]
    names = list(SIDES) if options.fork else list(SIDES)[:2]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        found = [compare(options, layout, names, Path(folder, layout.word)) for layout in options.layout]
    if options.json:
        print(json.dumps(document(found, load)))
    else:
        print("\n".join(lines(found, load, options.steps)))
    return 0 if all(comparison.same for comparison in found) else 1


def compare(options: argparse.Namespace, layout: Layout, names: Sequence[str], folder: Path) -> Comparison:
    """All rounds in one layout, each side once in each, every second one in reverse."""
    if not options.no_warm_up:  # brings files into the page cache and compiles modules
        run_round(options, layout, names, folder / "warm-up", steps=6, skip=2)
    rounds = []
    for i in range(options.rounds):
        order = names if i % 2 == 0 else names[::-1]
        rounds.append(run_round(options, layout, order, folder / f"{i + 1}", steps=options.steps, skip=options.skip))
        costs = ", ".join(f"{name} {rounds[-1][name].cpu_us:.1f}" for name in names)
        about = f"{layout.word}, round {i + 1} of {options.rounds}"
        print(f"{about}: CPU us per token: {costs}", file=sys.stderr, flush=True)
    return Comparison(layout, rounds)


def run_round(
    options: argparse.Namespace, layout: Layout, names: Sequence[str], folder: Path, *, steps: int, skip: int
) -> Round:
    tokens, nproc = tokens_per_step(options.recipe), layout.world_size
    found: Round = {}
    for name in names:
        out = folder / name
        command = SIDES[name](options.recipe, out, layout, steps)
        found[name] = observe(command, out, nproc=nproc, tokens_per_step=tokens, first=skip, last=steps - 2)
    return found


def ratios(rounds: Sequence[Round], field: str, other: str) -> list[float]:
    """meshwright / other of one quantity, a number for each round."""
    return [getattr(r["meshwright"], field) / getattr(r[other], field) for r in rounds]


def document(found: Sequence[Comparison], load: float) -> dict[str, object]:
    """Everything, for a program."""
    return {"load_average_at_start": load, "layouts": {c.layout.word: _numbers(c) for c in found}}


def _numbers(found: Comparison) -> dict[str, object]:
    others = [name for name in found.rounds[0] if name != "meshwright"]
    return {
        "rounds": [{name: dataclasses.asdict(seen) for name, seen in r.items()} for r in found.rounds],
        "ratios": {other: {row[0]: ratios(found.rounds, row[0], other) for row in ROWS} for other in others},
        "largest_loss_difference": found.difference,
        "losses_equal": found.same,
    }


def lines(found: Sequence[Comparison], load: float, steps: int) -> Iterator[str]:
    """The report, for people."""
    yield f"{steps} steps, {len(found[0].rounds)} rounds; load average at the start {load:.2f}"
    if load > 1.0:
        yield "warning: something else ran on this machine at the start; trust the CPU ratios, not the wall ones."
    for comparison in found:
        yield from _section(comparison)


def _section(found: Comparison) -> Iterator[str]:
    rounds = found.rounds
    for other in sorted(set(rounds[0]) - {"meshwright"}):
        yield ""
        title = f"{found.layout.word}, median over the rounds"
        yield f"{title:<32}{'meshwright':>12}{other:>12}{'ratio':>9}   range of the ratios"
        yield from (_line(rounds, other, *row) for row in ROWS)
    verdict = "the same training" if found.same else f"NOT the same: more than {LOSS_TOLERANCE:g}"
    loss, difference = rounds[-1]["meshwright"].loss, found.difference
    yield f"last loss {loss:.6f}; largest difference between sides {difference:.1e}: {verdict}"


def _line(rounds: Sequence[Round], other: str, field: str, title: str, unit: str, digits: int) -> str:
    ours, theirs = (statistics.median(getattr(r[side], field) for r in rounds) for side in ("meshwright", other))
    found = ratios(rounds, field, other)
    name = f"{title} ({unit})" if unit else title
    spread = f"{min(found):.3f} .. {max(found):.3f}"
    return f"{name:<34}{ours:>10,.{digits}f}{theirs:>12,.{digits}f}{statistics.median(found):>9.3f}   {spread}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="meshwright beside a hand-written loop, as ratios")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of one run a side (default: 6)")
    parser.add_argument("--steps", type=int, default=30, help="steps of each run (default: 30)")
    parser.add_argument("--skip", type=int, default=8, help="the window begins after this step (default: 8)")
    parser.add_argument("--layout", type=layouts_of, default=LAYOUTS, help=f"with commas between (default: {LAYOUTS})")
    parser.add_argument("--recipe", type=Path, default=HERE / "recipe.toml", help="what both train")
    parser.add_argument("--fork", action="store_true", help="also the hand loop with forked ranks")
    parser.add_argument("--no-warm-up", action="store_true", help="no unmeasured run of each side first")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
