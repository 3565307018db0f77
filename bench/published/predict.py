"""Setting -> Prediction: the same kind of figure as the published one, and the verdict that a user would have seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshwright.cost.memory import Memory, estimate, outside_bytes, stages_of
from meshwright.cost.quantities import StageQuantities
from meshwright.cost.terms import MOMENTS, moment_terms
from published.programs import Setting, setting_of
from published.rows import GIB, Row

VERDICTS: Final = ("no", "tight", "yes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What meshwright's formulas say of a row.

    Attributes:
        row: the published run.
        predicted_gib: of the same kind as the published figure.
        upper_gib: on which the verdict is made.
        capacity_gib: of the device; 0 where the source does not name the board.
        fits: yes | tight | no.
        moment: the fullest.
    """

    row: Row
    predicted_gib: float
    upper_gib: float
    capacity_gib: float
    fits: str
    moment: str

    @property
    def error(self) -> float | None:
        """Signed: predicted / measured - 1."""
        return self.predicted_gib / self.row.measured_gib - 1 if self.row.measured_gib else None


def predict(row: Row) -> Prediction:
    """Price a row."""
    setting = setting_of(row)
    job, candidate = setting.job, setting.candidate
    found = estimate(job, candidate, setting.stages)
    whole = estimate(job, candidate)
    return Prediction(
        row=row,
        predicted_gib=_figure(setting, found) / GIB,
        upper_gib=float(whole.reserved_bytes[0]) / GIB,
        capacity_gib=job.capacity_bytes / GIB,
        fits=VERDICTS[int(whole.fits[0])],
        moment=MOMENTS[int(found.moment[0])],
    )


def _figure(setting: Setting, found: Memory) -> float:
    total, outside = float(found.total_bytes[0]), float(outside_bytes(setting.job, setting.candidate))
    if setting.figure == "device":
        return total
    if setting.figure == "reserved":
        return total - outside
    return _allocated(setting) if setting.transient else float(found.allocated_bytes[0])


def _allocated(setting: Setting) -> float:
    """The fullest moment where gradients count only while they live."""
    job, candidate = setting.job, setting.candidate
    stages = setting.stages or stages_of(job, candidate)
    each = [moment_terms(StageQuantities(job, candidate, stage), transient=True) for stage in stages]
    return max(float(sum(terms.values())) for moments in each for terms in moments.values())
