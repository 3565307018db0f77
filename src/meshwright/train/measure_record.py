"""memory.json: what a step of the run was measured to take, moment by moment, beside what was predicted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

from meshwright.spec.moments import MOMENTS
from meshwright.train.agree import Agreement
from meshwright.train.foresight import LIMIT_S, Bytes, Seer
from meshwright.train.measure import Reading
from meshwright.train.measure_watch import MemoryWatch
from meshwright.train.run_folder import MEMORY, write_text
from meshwright.train.step import StepResult
from meshwright.train.trainer import Trainer

_MEASURED: Final = 3
"""Which step of a run is measured. The first makes the optimizer's state, and in the second DDP lays its buckets anew,
in the order in which it saw the gradients come."""

OWN_OPTIMIZER: Final = "two numbers for each weight: the optimizer is one of the user's own"
"""What a prediction has to assume of what nobody knows."""

Told = tuple[dict[str, Reading] | None, str]
"""What a rank measured, and why it did not."""


@final
class MemoryRecord:
    """Has one step of a run measured on every rank, and writes the largest figures down on rank 0.

    Args:
        folder: run folder; None measures nothing.
        trainer: of the run.
        agreement: of its ranks.
        first: steps done before.
        end: the last step.
        seer: knows what was predicted, sooner or later.
    """

    def __init__(
        self, folder: Path | None, trainer: Trainer, agreement: Agreement, first: int, end: int, seer: Seer
    ) -> None:
        self._seer, self._facts = seer, dict[str, Any]()
        self._assumed = OWN_OPTIMIZER if trainer.has_own_optimizer else ""
        self._folder = folder if trainer.recipe.record.memory else None
        self._agreement, self._first, self._end = agreement, first, end
        self._device, self._layout = trainer.mesh.device, trainer.layout.word
        self._batch = trainer.batch.global_batch_size
        self._watch = MemoryWatch(trainer.state, trainer.mesh.device)
        if self._folder is not None:
            trainer.stepper.watch = self._watch
            self.expect(end)

    def expect(self, end: int) -> None:
        """Set what the last step is, before the first."""
        self._end = end
        if self._folder is not None and end > self._first:
            self._watch.due = min(self._first + _MEASURED, end) - 1

    def after(self, result: StepResult) -> None:
        """A step has been made; collective if it was the one."""
        if self._watch.due is None or result.step != self._watch.due + 1:
            return
        readings = self._watch.end()
        is_whole = not result.skipped and result.samples == self._batch
        if not is_whole and result.step < self._end:  # the next may be; fp16 skips some at the start
            self._watch.due += 1
            return
        self._watch.due = None
        everyone = self._agreement.gather((readings, self._watch.why))
        if self._agreement.rank == 0:
            self._write(result.step, everyone)

    def _write(self, step: int, everyone: Sequence[Told]) -> None:
        measured, why = together(everyone)
        self._facts = {"step": step, "layout": self._layout, "device": self._device.type, "measured": measured}
        self._facts |= {"because": why, "assumed": self._assumed}
        self._put_down(0.0)

    def _put_down(self, limit_s: float) -> None:
        """Write the file, with the prediction if it is there within so many seconds."""
        predicted, why = self._seer.result(limit_s)
        facts = self._facts | {"predicted": predicted and beside(predicted, self._facts["measured"])}
        facts["because"] = " ".join(part for part in (self._facts["because"], why) if part)
        assert self._folder is not None
        with suppress(OSError):  # no reason to end a run; what it needs of its folder will say so
            write_text(self._folder / MEMORY, json.dumps(facts, indent=1) + "\n")

    def close(self) -> None:
        """Stop measuring; wait for the prediction of what was measured."""
        self._watch.abandon()
        if self._facts:
            self._put_down(LIMIT_S)
        self._seer.close()


def beside(predicted: Bytes, measured: Mapping[str, Any] | None) -> dict[str, Any]:
    """Each moment's prediction: its sum, its terms, and by how much it is off what was measured."""
    found: dict[str, Any] = {}
    for moment, terms in predicted.items():
        total = sum(terms.values())
        found[moment] = {"predicted_bytes": total, "terms": dict(terms)}
        seen = (measured or {}).get(moment)
        if seen:
            found[moment]["error"] = round(total / seen["measured_bytes"] - 1, 6) if seen["measured_bytes"] else None
    return found


def together(everyone: Sequence[Told]) -> tuple[dict[str, Any] | None, str]:
    """For each moment the rank that took most, as memory.json has it; or None, and why."""
    for rank, (readings, why) in enumerate(everyone):
        if readings is None:
            return None, f"rank {rank}: {why}"
    ranks = [readings for readings, _ in everyone if readings is not None]
    return {moment: _largest([readings.get(moment) for readings in ranks]) for moment in MOMENTS}, ""


def _largest(readings: Sequence[Reading | None]) -> dict[str, Any] | None:
    """None where a moment never came."""
    found = {rank: reading for rank, reading in enumerate(readings) if reading is not None}
    if not found:
        return None
    rank = max(found, key=lambda rank: found[rank].measured_bytes)
    facts = dataclasses.asdict(found[rank]) | {"rank": rank}
    return {name: value for name, value in facts.items() if value not in (None, {})}
