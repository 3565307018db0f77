"""Recipe: one fully determined run. Workload: the part of it that is held fixed when the hardware changes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from meshwright.spec.keys import about
from meshwright.spec.sections import (
    BatchSection,
    CheckpointSection,
    ClusterSection,
    DataSection,
    LayoutSection,
    LossSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RecordSection,
    ScheduleSection,
    TrainSection,
    ValidationSection,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything one run is made of, section by section as in its TOML file.

    A Recipe from `spec.load` has passed every check that needs no run. `[layout]` may still be open
    (`dp_replicate` left out): `spec.layout.resolve` closes it for a number of processes.
    """

    model: ModelSection
    data: DataSection = field(default_factory=DataSection)
    loss: LossSection = field(default_factory=LossSection)
    batch: BatchSection
    optimizer: OptimizerSection
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    layout: LayoutSection = field(default_factory=LayoutSection)
    train: TrainSection
    validation: ValidationSection = field(default_factory=ValidationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    record: RecordSection = field(default_factory=RecordSection)

    @property
    def workload(self) -> Workload:
        """The keys that a resume may not change, by key path."""
        return Workload({path: value for path, value, knob in walk(self) if not knob})


@dataclass(frozen=True, slots=True)
class Workload:
    """What must be computed, whatever it runs on: model, data, batch, loss, precision, optimizer, schedule, seed.

    Attributes:
        values: key path (`optimizer.lr`) to value, for every key that is not a knob.
    """

    values: dict[str, Any]

    def differences(self, other: Workload) -> list[tuple[str, Any, Any]]:
        """Key paths at which two workloads differ, with this one's value and the other's."""
        paths = [*self.values, *(path for path in other.values if path not in self.values)]
        pairs = ((path, self.values.get(path), other.values.get(path)) for path in paths)
        return [(path, mine, theirs) for path, mine, theirs in pairs if mine != theirs]


def walk(recipe: Recipe) -> list[tuple[str, Any, bool]]:
    """Every key of a recipe: its path, its value, and whether it is a knob that may change on resume."""
    rows = []
    for section in dataclasses.fields(recipe):
        part = getattr(recipe, section.name)
        for one in dataclasses.fields(part):
            rows.append((f"{section.name}.{one.name}", getattr(part, one.name), about(one).knob))
    return rows
