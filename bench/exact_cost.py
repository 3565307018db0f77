"""What exact mode costs beside fast mode, layout by layout. `make exactcost` runs it.

meshwright trains exact.toml in both modes; rounds are interleaved, fast exact, exact fast, ..., each gives one ratio,
and the result is the median over the rounds. All is seen from outside (observe.py), but for the bytes, which other,
short runs count (count_bytes.py):

    CPU per token   user + system time of all threads of all ranks, between the line of step --skip in
                        metrics.jsonl and that of the last step but two, over the tokens of those steps; exact mode
                        computes the first step twice, which is outside
    bytes sent      payload of one step and rank by the ring formula: all-reduce 2 (n - 1) / n of a tensor,
                        reduce-scatter and all-gather (n - 1) / n; of the rank that sends most
    peak memory     VmHWM of the largest rank over its whole life; pages that forked ranks share count in full

The last loss of exact mode must be one number for all layouts; if not, the exit code is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from observe import Observation, environment, observe
from sides import HERE, MODES, layouts_of, meshwright, tokens_per_step

LAYOUTS: Final = "single,ddp2,zero1x2,zero2x2,zero3x2,ddp4,zero3x4,hsdp2x2"

Round = dict[str, dict[str, Observation]]
"""By layout word and mode."""

Sent = dict[str, dict[str, float]]
"""Bytes of a step and rank, by layout word and mode."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        sent = count(options, Path(folder) / "bytes")
        rounds = [run_round(options, i, Path(folder)) for i in range(options.rounds)]
    losses = {seen["exact"].loss for r in rounds for seen in r.values()}
    if options.json:
        print(json.dumps(document(rounds, sent, losses, load)))
    else:
        print("\n".join(lines(rounds, sent, losses, load)))
    return 0 if len(losses) == 1 else 1


def run_round(options: argparse.Namespace, number: int, folder: Path) -> Round:
    """Each layout in both modes, every second round in reverse."""
    tokens, steps = tokens_per_step(options.recipe), options.steps
    found: Round = {}
    for layout in options.layouts:
        found[layout.word] = {}
        for mode in MODES if number % 2 == 0 else MODES[::-1]:
            out = folder / f"{number}-{layout.word}-{mode}"
            command = [*meshwright(options.recipe, out, layout, steps), f"train.reduction={mode}"]
            found[layout.word][mode] = observe(
                command, out, nproc=layout.world_size, tokens_per_step=tokens, first=options.skip, last=steps - 2
            )
        ratio = found[layout.word]["exact"].cpu_us / found[layout.word]["fast"].cpu_us
        print(f"round {number + 1} of {options.rounds}: {layout.word}: CPU x {ratio:.3f}", file=sys.stderr, flush=True)
    return found


def count(options: argparse.Namespace, folder: Path) -> Sent:
    """Bytes that a rank sends in a step; these runs also bring files into the page cache."""
    words = ",".join(layout.word for layout in options.layouts)
    command = [sys.executable, str(HERE / "count_bytes.py"), str(options.recipe), str(folder), "--layouts", words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found = json.loads((folder / "bytes.json").read_text())
    return {word: {mode: sum(sent[mode].values()) for mode in MODES} for word, sent in found.items()}


def ratios(rounds: Sequence[Round], word: str) -> list[float]:
    """exact / fast of the CPU time per token, a number for each round."""
    return [r[word]["exact"].cpu_us / r[word]["fast"].cpu_us for r in rounds]


def medians(rounds: Sequence[Round], word: str, field: str) -> list[float]:
    """Of one quantity, fast and exact."""
    return [statistics.median(getattr(r[word][mode], field) for r in rounds) for mode in MODES]


def document(rounds: Sequence[Round], sent: Sent, losses: set[float], load: float) -> dict[str, object]:
    """Everything, for a program."""
    plain = [{w: {mode: dataclasses.asdict(o) for mode, o in seen.items()} for w, seen in r.items()} for r in rounds]
    return {
        "load_average_at_start": load,
        "rounds": plain,
        "cpu_ratios": {word: ratios(rounds, word) for word in sent},
        "bytes_per_step_and_rank": sent,
        "exact_last_losses": sorted(losses),
    }


def lines(rounds: Sequence[Round], sent: Sent, losses: set[float], load: float) -> Iterator[str]:
    """The table, for people."""
    yield f"{len(rounds)} rounds, medians; load average at the start {load:.2f}"
    yield f"{'':<10}{'CPU us per token':^40}{'MB sent a step and rank':^26}{'peak MiB, largest rank':>26}"
    yield f"{'layout':<10}{'fast':>8}{'exact':>8}{'ratio':>8}   {'range':<15}" + (
        f"{'fast':>8}{'exact':>8}{'ratio':>8}  {'fast':>8}{'exact':>8}{'more':>8}"
    )
    yield from (_line(rounds, word, sent[word]) for word in sent)
    yield ""
    if len(losses) == 1:
        yield f"last loss of exact mode {min(losses)!r}, the same in every run"
    else:
        yield f"exact mode is NOT exact: its last losses are {sorted(losses)}"


def _line(rounds: Sequence[Round], word: str, sent: dict[str, float]) -> str:
    found = ratios(rounds, word)
    fast, exact = medians(rounds, word, "cpu_us")
    low, high = medians(rounds, word, "peak_max_mib")
    spread = f"{min(found):.3f} .. {max(found):.3f}"
    megabytes = "".join(f"{sent[mode] / 1e6:>8.2f}" for mode in MODES)
    more = f"{sent['exact'] / sent['fast']:>8.2f}" if sent["fast"] else f"{'-':>8}"
    cpu = f"{fast:>8.1f}{exact:>8.1f}{statistics.median(found):>8.3f}   {spread:<15}"
    return f"{word:<10}{cpu}{megabytes}{more}  {low:>8.0f}{high:>8.0f}{high - low:>8.0f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="what exact mode costs beside fast mode")
    parser.add_argument("--layouts", type=layouts_of, default=LAYOUTS, help=f"(default: {LAYOUTS})")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of one run a layout and mode (default: 2)")
    parser.add_argument("--steps", type=int, default=5, help="steps of each run (default: 5)")
    parser.add_argument("--skip", type=int, default=1, help="the window begins after this step (default: 1)")
    parser.add_argument("--recipe", type=Path, default=HERE / "exact.toml", help="what is trained")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
