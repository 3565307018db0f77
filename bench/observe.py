"""Watch one training command from outside, the same way whatever it is.

Nothing is added to what is watched: its progress is read from the metrics.jsonl that it writes, its costs from the
kernel. Each mark is taken when a line of the log is first seen, at most a poll later on one side as on the other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

POLL_S: Final = 0.01
LAUNCHER_VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Mark:
    """What had been used when a step was first seen to be done: CPU seconds are user + system, all threads."""

    step: int
    wall_s: float
    ranks_cpu_s: float
    launcher_cpu_s: float


@dataclass(frozen=True, slots=True)
class Observation:
    """One run. Per token means per token of the global batch, over the steps between the two marks.

    Attributes:
        cpu_us: CPU microseconds per token of all ranks.
        all_cpu_us: the same with the launching process.
        tokens_per_s: global.
        first_step_s: from the start of the command to the first line of the log.
        start_cpu_s: CPU seconds of ranks and launcher until then.
        peak_max_mib: highest resident memory (VmHWM) of a rank; forked ranks count pages that they share in full.
        peak_sum_mib: sum over the ranks.
        loss: of the last step.
    """

    cpu_us: float
    all_cpu_us: float
    tokens_per_s: float
    first_step_s: float
    start_cpu_s: float
    peak_max_mib: float
    peak_sum_mib: float
    loss: float


def environment(threads: int = 1) -> dict[str, str]:
    """This process's, without what would make a child a rank; compiled modules may be kept, as where a user runs."""
    dropped = {*LAUNCHER_VARIABLES, "PYTHONDONTWRITEBYTECODE"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"OMP_NUM_THREADS": str(threads)}


def observe(
    command: Sequence[str], out: Path, *, nproc: int, tokens_per_step: int, first: int, last: int
) -> Observation:
    """Run the command to its end.

    Args:
        command: writes `out`/metrics.jsonl, a line a step.
        out: its folder.
        nproc: ranks that it starts.
        tokens_per_step: tokens of the global batch.
        first: the window begins when this step is done.
        last: and ends when this one is; not the run's last, so that saving and leaving stay outside.

    Raises:
        RuntimeError: the command fails, or is no training of that many ranks and steps.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f"{out.name}.log").open("w+") as console:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment(), stdout=console, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            marks, peaks = _watch(process, out / "metrics.jsonl", nproc, (1, first, last))
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if process.returncode or len(marks) < 3:
            console.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{console.read()[-3000:]}")
    return _evaluate(marks, peaks, began, tokens_per_step, _last_loss(out / "metrics.jsonl"))


def _watch(
    process: subprocess.Popen[bytes], log: Path, nproc: int, wanted: Sequence[int]
) -> tuple[list[Mark], dict[int, float]]:
    """Marks at the wanted steps, and each rank's highest VmHWM that was seen."""
    marks: list[Mark] = []
    peaks: dict[int, float] = {}
    ranks: list[int] = []
    done, size = 0, 0
    while process.poll() is None:
        with suppress(OSError):
            if log.stat().st_size != size:
                size = log.stat().st_size
                done = log.read_bytes().count(b"\n")
        if done and not ranks:
            ranks = _ranks(process.pid, nproc)
        if len(marks) < len(wanted) and done >= wanted[len(marks)]:
            with suppress(OSError):  # a rank of a very short run is gone already
                marks.append(_mark(done, process.pid, ranks))
        for rank in ranks:
            peaks[rank] = max(peaks.get(rank, 0.0), _peak_mib(rank))
        time.sleep(POLL_S)
    return marks, peaks


def _mark(step: int, launcher: int, ranks: Sequence[int]) -> Mark:
    own = 0.0 if launcher in ranks else cpu_s(launcher)
    return Mark(step, time.perf_counter(), sum(cpu_s(rank) for rank in ranks), own)


def _evaluate(
    marks: Sequence[Mark], peaks: Mapping[int, float], began: float, tokens_per_step: int, loss: float
) -> Observation:
    start, first, last = marks
    tokens = (last.step - first.step) * tokens_per_step
    if tokens <= 0:
        raise RuntimeError(
            f"no steps between step {first.step} and step {last.step}: steps are too short to be watched."
        )
    ranks_s = last.ranks_cpu_s - first.ranks_cpu_s
    launcher_s = last.launcher_cpu_s - first.launcher_cpu_s
    return Observation(
        cpu_us=1e6 * ranks_s / tokens,
        all_cpu_us=1e6 * (ranks_s + launcher_s) / tokens,
        tokens_per_s=tokens / (last.wall_s - first.wall_s),
        first_step_s=start.wall_s - began,
        start_cpu_s=start.ranks_cpu_s + start.launcher_cpu_s,
        peak_max_mib=max(peaks.values()),
        peak_sum_mib=sum(peaks.values()),
        loss=loss,
    )


def _last_loss(log: Path) -> float:
    return float(json.loads(log.read_text().splitlines()[-1])["loss"])


def cpu_s(pid: int) -> float:
    """User + system time of all threads of a process, those that ended included, in the kernel's nanoseconds.

    The clock id is the one that clock_getcpuclockid(3) gives; Python does not wrap that call.
    """
    return time.clock_gettime((~pid << 3) | 2)


def _ranks(launcher: int, nproc: int) -> list[int]:
    """The launcher's children, or itself if it has none."""
    ranks = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == launcher] or [
        launcher
    ]
    if len(ranks) != nproc:
        raise RuntimeError(f"the command has {len(ranks)} processes, not {nproc} ranks.")
    return ranks


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return 0


def _peak_mib(pid: int) -> float:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0
