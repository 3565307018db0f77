"""meshwright beside a hand-written loop, as ratios. `make bench` runs it.

Both train recipe.toml on the same samples from the same weights: meshwright as `meshwright train`, recording as always;
the hand-written loop under torchrun. Rounds are interleaved, A B, B A, ..., so that what else the machine does falls
on both; each round gives one ratio, and the median over the rounds is the result. Both are watched from outside in the
same way (observe.py):

    CPU per token       user + system time of all threads of all ranks, between the line of step --skip in
                        metrics.jsonl and that of the last step but two, over the tokens of those steps
    first step          from the start of the command to the first line of metrics.jsonl
    peak memory         VmHWM of each rank over its whole life; pages that forked ranks share count in each
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from observe import Observation, observe

HERE: Final = Path(__file__).parent
LOSS_TOLERANCE: Final = 1e-4
ROWS: Final = (
    ("cpu_us", "CPU per token, ranks", "us", 1),
    ("all_cpu_us", "CPU per token, with launcher", "us", 1),
    ("tokens_per_s", "tokens per second", "", 0),
    ("first_step_s", "time to the first step", "s", 2),
    ("start_cpu_s", "CPU until the first step", "s", 2),
    ("peak_max_mib", "peak memory, largest rank", "MiB", 0),
    ("peak_sum_mib", "peak memory, all ranks", "MiB", 0),
)

Command = Callable[[Path, Path, int, int], list[str]]
Round = dict[str, Observation]


def meshwright(recipe: Path, out: Path, nproc: int, steps: int) -> list[str]:
    command = [sys.executable, "-m", "meshwright", "train", str(recipe), "--nproc", str(nproc)]
    return [*command, "--run-dir", str(out), "--set", f"train.steps={steps}"]


def hand(recipe: Path, out: Path, nproc: int, steps: int) -> list[str]:
    loop = [str(HERE / "hand_loop.py"), str(recipe), str(out), "--steps", str(steps)]
    if nproc == 1:
        return [sys.executable, *loop]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), *loop]


def hand_forked(recipe: Path, out: Path, nproc: int, steps: int) -> list[str]:
    loop = [str(HERE / "hand_loop.py"), str(recipe), str(out), "--steps", str(steps)]
    return [sys.executable, *loop, "--fork", str(nproc)]


SIDES: Final[dict[str, Command]] = {"meshwright": meshwright, "hand": hand, "hand-forked": hand_forked}


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    load = os.getloadavg()[0]
    names = list(SIDES) if options.fork else list(SIDES)[:2]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        rounds = run_rounds(options, names, Path(folder))
    difference = max(abs(r[name].loss - r["meshwright"].loss) for r in rounds for name in names)
    if options.json:
        print(json.dumps(document(rounds, difference, load)))
    else:
        print("\n".join(lines(rounds, difference, load, options)))
    return 0 if difference <= LOSS_TOLERANCE else 1


def run_rounds(options: argparse.Namespace, names: Sequence[str], folder: Path) -> list[Round]:
    """All rounds, each side once in each, every second one in reverse."""
    if not options.no_warm_up:  # brings files into the page cache and compiles modules
        run_round(options, names, folder / "warm-up", steps=6, skip=2)
    rounds = []
    for i in range(options.rounds):
        order = names if i % 2 == 0 else names[::-1]
        rounds.append(run_round(options, order, folder / f"round{i + 1}", steps=options.steps, skip=options.skip))
        costs = ", ".join(f"{name} {rounds[-1][name].cpu_us:.1f}" for name in names)
        print(f"round {i + 1} of {options.rounds}: CPU us per token: {costs}", file=sys.stderr, flush=True)
    return rounds


def run_round(options: argparse.Namespace, names: Sequence[str], folder: Path, *, steps: int, skip: int) -> Round:
    described = tomllib.loads(options.recipe.read_text())
    tokens = described["batch"]["global_batch_size"] * described["data"]["seq_len"]
    found: Round = {}
    for name in names:
        out = folder / name
        command = SIDES[name](options.recipe, out, options.nproc, steps)
        found[name] = observe(command, out, nproc=options.nproc, tokens_per_step=tokens, first=skip, last=steps - 2)
    return found


def ratios(rounds: Sequence[Round], field: str, other: str) -> list[float]:
    """meshwright / other of one quantity, a number for each round."""
    return [getattr(r["meshwright"], field) / getattr(r[other], field) for r in rounds]


def document(rounds: Sequence[Round], difference: float, load: float) -> dict[str, object]:
    """Everything, for a program."""
    others = [name for name in rounds[0] if name != "meshwright"]
    return {
        "load_average_at_start": load,
        "rounds": [{name: dataclasses.asdict(seen) for name, seen in r.items()} for r in rounds],
        "ratios": {other: {row[0]: ratios(rounds, row[0], other) for row in ROWS} for other in others},
        "largest_loss_difference": difference,
        "losses_equal": difference <= LOSS_TOLERANCE,
    }


def lines(rounds: Sequence[Round], difference: float, load: float, options: argparse.Namespace) -> Iterator[str]:
    """The report, for people."""
    yield f"{options.nproc} ranks, {options.steps} steps, {len(rounds)} rounds; load average at the start {load:.2f}"
    if load > 1.0:
        yield "warning: something else ran on this machine at the start; trust the CPU ratios more than the wall ones."
    for other in sorted(set(rounds[0]) - {"meshwright"}):
        yield ""
        yield f"{'median over the rounds':<32}{'meshwright':>12}{other:>12}{'ratio':>9}   range of the ratios"
        yield from (_line(rounds, other, *row) for row in ROWS)
    verdict = "the same training" if difference <= LOSS_TOLERANCE else f"NOT the same: more than {LOSS_TOLERANCE:g}"
    yield ""
    yield f"last loss {rounds[-1]['meshwright'].loss:.6f}; largest difference between sides {difference:.1e}: {verdict}"


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
    parser.add_argument("--nproc", type=int, default=2, help="ranks (default: 2); 1 runs the loop without torchrun")
    parser.add_argument("--recipe", type=Path, default=HERE / "recipe.toml", help="what both train")
    parser.add_argument("--fork", action="store_true", help="also the hand loop with forked ranks")
    parser.add_argument("--no-warm-up", action="store_true", help="no unmeasured run of each side first")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
