"""A table of a recipe file into its sections, every fault collected and none raised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from typing import Any

from meshwright.errors import Fault, LayoutError
from meshwright.spec.hints import section_keys, sections, unknown_key
from meshwright.spec.keys import Table, about
from meshwright.spec.layout import parse_layout
from meshwright.spec.nearest import shown
from meshwright.spec.optimizers import OPTIMIZERS, REFUSED
from meshwright.spec.recipe import Recipe
from meshwright.spec.values import converted, plain_fault, value_fault

MODEL_BUILD_KEYS = ("name", "hf", "build")
"""All that keeps its meaning in `[model]` beside `build`; every other key is a keyword argument."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What could be made of a recipe's table, or of one section.

    Attributes:
        sections: sections by name; an unreadable or missing key stands at its default, or at a placeholder.
        given: key paths that stand in the table.
        unsound: key paths, or whole sections, whose value there means nothing.
        faults: what is wrong so far.
    """

    sections: dict[str, Any]
    given: frozenset[str]
    unsound: frozenset[str]
    faults: tuple[Fault, ...]

    @property
    def recipe(self) -> Recipe:
        """The sections as a recipe; to be trusted where it is sound."""
        return Recipe(**self.sections)

    def is_sound(self, paths: tuple[str, ...]) -> bool:
        """Whether every one of these keys holds what the table says, or its default."""
        return not any(path in self.unsound or path.split(".")[0] in self.unsound for path in paths)


def read(table: Table) -> Reading:
    """Read every section of a recipe; what stands beside them is a fault each."""
    known = sections()
    strangers = tuple(unknown_key("", str(name), known) for name in table if name not in known)
    parts = [_read_part(name, section, table.get(name, {})) for name, section in known.items()]
    return Reading(
        {name: made for part in parts for name, made in part.sections.items()},
        frozenset().union(*(part.given for part in parts)),
        frozenset().union(*(part.unsound for part in parts)),
        strangers + tuple(fault for part in parts for fault in part.faults),
    )


def _read_part(name: str, section: type, part: Any) -> Reading:
    if isinstance(part, Mapping):
        return _read_section(name, section, part)
    if name == "layout" and isinstance(part, str):
        try:
            return _read_section(name, section, asdict(parse_layout(part)))
        except LayoutError as error:
            fault = Fault(error.asked, error.rule, error.nearest)
    else:
        keys = section_keys(section)
        near = f"Nearest: {name}.{keys[0]} = {shown(part)}." if isinstance(part, (str, int, float)) else ""
        fault = Fault(name, f"is {shown(part)}, must be a table: [{name}] with {', '.join(keys)}.", near)
    return Reading(_read_section(name, section, {}).sections, frozenset(), frozenset([name]), (fault,))


def _read_section(name: str, section: type, part: Table) -> Reading:
    declared = {key: field for key, field in _declared(section).items() if _is_own(name, key, part)}
    faults: list[Fault] = []
    values: dict[str, Any] = {}
    for key, field in declared.items():
        fault = _field_fault(f"{name}.{key}", part, field)
        if fault:
            faults.append(fault)
        if key in part and not fault:
            values[key] = _as_field(part[key], field)
        elif field.default is MISSING:
            values[key] = 1
    unsound = frozenset(fault.where for fault in faults)
    extra = {str(key): value for key, value in part.items() if key not in declared}
    opened, strange = _open_table(name, section, extra, "build" in part)
    given = frozenset(f"{name}.{key}" for key in part)
    return Reading({name: section(**values, **opened)}, given, unsound, (*faults, *strange))


def _declared(section: type) -> dict[str, Field[Any]]:
    return {field.name: field for field in fields(section) if not field.metadata.get("open")}


def _is_own(name: str, key: str, part: Table) -> bool:
    return name != "model" or "build" not in part or key in MODEL_BUILD_KEYS


def _open_table(name: str, section: type, extra: Table, has_build: bool) -> tuple[dict[str, Table], list[Fault]]:
    """The section's open table, if it has one, and what is wrong with the keys that no field declares."""
    keys = section_keys(section)
    if name == "optimizer" and not has_build:
        options = {option: None for known in OPTIMIZERS.values() for option in known.options}
        strange = [
            unknown_key(name, key, [*keys, *options]) for key in extra if key not in options and key not in REFUSED
        ]
        unknown = {fault.where.removeprefix("optimizer.") for fault in strange}
        return {"options": _plain({key: value for key, value in extra.items() if key not in unknown})}, strange
    if name in ("model", "data", "optimizer") and has_build:
        found = [plain_fault(f"{name}.{key}", value) for key, value in extra.items()]
        held = "options" if name == "optimizer" else "arguments"
        return {held: _plain(extra)}, [fault for fault in found if fault]
    return {}, [unknown_key(name, key, keys) for key in extra]


def _field_fault(where: str, part: Table, field: Field[Any]) -> Fault | None:
    if field.name not in part:
        return Fault(where, "is required.", about(field).meaning) if field.default is MISSING else None
    value = part[field.name]
    if field.name == "groups":
        right = isinstance(value, (list, tuple)) and all(isinstance(item, Mapping) for item in value)
        near = 'Nearest: [{ pattern = "*.bias", weight_decay = 0.0 }].'
        return None if right else Fault(where, f"is {shown(value)}, must be a list of tables.", near)
    if kind_of(field) == "Table":
        right = isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values())
        near = 'Nearest: { "layers.*.up" = "column" }.'
        return None if right else Fault(where, f"is {shown(value)}, must be a table of patterns and words.", near)
    return value_fault(where, value, kind_of(field), about(field))


def _as_field(value: Any, field: Field[Any]) -> Any:
    if field.name == "groups":
        return tuple(_plain(item) for item in value)
    return _plain(value) if kind_of(field) == "Table" else converted(value, kind_of(field))


def kind_of(field: Field[Any]) -> str:
    """The type a key is declared with, without `| None`: `str`, `int`, `float`, `bool`, `Table` or that of `groups`."""
    return str(field.type).removesuffix(" | None")


def _plain(value: Any) -> Any:
    """A copy of nothing but dicts and lists, so that recipes compare equal however they were read."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
