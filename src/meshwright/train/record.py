"""What rank 0 says and writes: lines, a progress bar, metrics.jsonl, samples.jsonl, TensorBoard, summary.json."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, final

from meshwright.errors import SpecError
from meshwright.streams import discard_stdout, write_line
from meshwright.train.run_folder import METRICS, SAMPLES, SUMMARY, write_text, writing
from meshwright.train.step import StepResult

PLAIN_EVERY_S: Final = 5.0
"""Seconds between progress lines where there is no terminal; the first and last steps are always printed."""


@final
class Console:
    """Prints on rank 0 and is silent elsewhere.

    Args:
        speaks: True on rank 0.
        progress: False leaves only warnings.
        total: the last step.
        start: steps done before.
    """

    def __init__(self, *, speaks: bool, progress: bool, total: int, start: int) -> None:
        self.speaks, self.shows, self.total = speaks, speaks and progress, total
        self._bar = _progress_bar(total, start) if self.shows and sys.stderr.isatty() else None
        self._printed_s, self._begin = 0.0, (start, time.perf_counter())

    def say(self, line: str) -> None:
        """Print one line."""
        if not self.shows:
            return
        if self._bar is not None:
            self._bar.clear()
        self._print(line)

    def warn(self, line: str) -> None:
        """Print one warning on the error stream."""
        if self.speaks:
            with suppress(OSError):
                write_line(sys.stderr, f"warning: {line}")

    def _print(self, line: str) -> None:
        """A reader that leaves (`| head`) ends the printing, and not the training."""
        try:
            write_line(sys.stdout, line)
        except OSError:
            self.shows = False
            discard_stdout()

    def expect(self, total: int) -> None:
        """Set what the last step is."""
        self.total = total
        if self._bar is not None:
            self._bar.total = total

    def step(self, row: Mapping[str, Any]) -> None:
        """Show one step."""
        if not self.shows:
            return
        text = f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(1)
            return
        now = time.perf_counter()
        if row["step"] in (self._begin[0] + 1, self.total) or now - self._printed_s >= PLAIN_EVERY_S:
            self._printed_s = now
            self._print(f"step {row['step']}/{self.total}  {text}  lr {row['lr']:.2e}  {self._eta(row['step'], now)}")

    def _eta(self, step: int, now: float) -> str:
        first, since = self._begin
        left = (self.total - step) * (now - since) / max(1, step - first)
        return f"ETA {int(left // 60)}:{int(left % 60):02d}"

    def close(self) -> None:
        """End the progress bar."""
        if self._bar is not None:
            self._bar.close()


def _progress_bar(total: int, start: int) -> Any:
    from tqdm import tqdm  # 0.1 s that only a terminal needs

    return tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, mininterval=0.2, leave=True)


@final
class Recorder:
    """Writes the record of a run on rank 0; on other ranks it writes nothing.

    Args:
        folder: run folder; None records nothing.
        speaks: True on rank 0.
        tensorboard: write event files too.
        start: step that the run begins at.
    """

    def __init__(self, folder: Path | None, *, speaks: bool, tensorboard: bool, start: int) -> None:
        self.folder = folder if speaks else None
        self._metrics: IO[str] | None = None
        self._samples: IO[str] | None = None
        self._events = _event_writer(self.folder, start) if tensorboard and self.folder is not None else None
        if self.folder is not None:
            with writing(self.folder):
                self._metrics = (self.folder / METRICS).open("a", encoding="utf-8")

    def step(self, row: Mapping[str, Any]) -> None:
        """Append one step, and flush: a killed run keeps every line."""
        if self.folder is not None and self._metrics is not None:
            with writing(self.folder):
                self._metrics.write(_json(row) + "\n")
                self._metrics.flush()
        if self._events is not None:
            self._events.add(row)

    def samples(self, step: int, epoch: int, ids: list[int]) -> None:
        """Append the sample ids of one step, in the order of the microbatch grid."""
        if self.folder is None:
            return
        with writing(self.folder):
            self._samples = self._samples or (self.folder / SAMPLES).open("a", encoding="utf-8")
            self._samples.write(json.dumps({"step": step, "epoch": epoch, "samples": ids}) + "\n")
            self._samples.flush()

    def summary(self, facts: Mapping[str, Any]) -> None:
        """Write summary.json."""
        if self.folder is not None:
            with writing(self.folder):
                write_text(self.folder / SUMMARY, _json(facts, indent=1) + "\n")

    def close(self) -> None:
        """Close all files."""
        for file in (self._metrics, self._samples, self._events):
            if file is not None:
                with suppress(OSError):  # what could not be written has been said by then
                    file.close()


def _json(facts: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON as its standard has it: there NaN and infinity do not exist, and a skipped step may have them."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}
    return json.dumps(finite, indent=indent, allow_nan=False)


@final
class _Events:
    """Scalars as TensorBoard event files, through the tensorboard package: torch's wrapper costs 2 s of import."""

    def __init__(self, writer: Any, event: Any, summary: Any) -> None:
        self.writer, self.event, self.summary = writer, event, summary

    def add(self, row: Mapping[str, Any]) -> None:
        scalars = {k: float(v) for k, v in row.items() if k != "step" and isinstance(v, int | float)}
        values = [self.summary.Value(tag=f"train/{name}", simple_value=value) for name, value in scalars.items()]
        self.writer.add_event(self.event(wall_time=time.time(), step=row["step"], summary=self.summary(value=values)))

    def close(self) -> None:
        self.writer.close()


def require_tensorboard() -> None:
    """Refuse event files where nothing can write them, before anything is on disk.

    Raises:
        SpecError: the package is missing.
    """
    try:
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ImportError as error:
        raise SpecError(
            "record.tensorboard = true",
            "needs the package tensorboard.",
            "Install it with: pip install 'meshwright[tensorboard]'",
        ) from error


def _event_writer(folder: Path, start: int) -> _Events:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder / "tensorboard"))
    # Tells TensorBoard to drop what an earlier, longer run of this folder wrote past the checkpoint.
    writer.add_event(Event(wall_time=time.time(), step=start + 1, session_log=SessionLog(status=SessionLog.START)))
    return _Events(writer, Event, Summary)


def metrics_row(result: StepResult, *, tokens: int, samples: int, seconds: float) -> dict[str, Any]:
    """The line of metrics.jsonl for one step.

    Args:
        result: what the step did.
        tokens: label tokens so far.
        samples: samples so far.
        seconds: wall time of the step.
    """
    row: dict[str, Any] = {
        "step": result.step,
        "loss": result.loss,
        "lr": result.lr,
        "grad_norm": result.grad_norm,
        "tokens": tokens,
        "samples": samples,
        "step_time_s": seconds,
        "tokens_per_s": result.count / seconds,
    }
    return row | ({"skipped": result.skipped} if result.skipped else {})
