"""A ModelSpec as one JSON document, and back to an equal value: how a traced model comes out of the child process.

Reading checks every key and every type, so that a file of another version, or one written by hand, is refused with its
key and never half understood.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from meshwright.errors import SpecError
from meshwright.spec.model_spec import ModelSpec
from meshwright.spec.nearest import closest, listed, shown

FORMAT: Final = "meshwright model spec"
VERSION: Final = 1


def spec_to_json(spec: ModelSpec) -> str:
    """The whole value as JSON text; `spec_from_json` gives back an equal one."""
    import json  # Only a trace needs it.

    return json.dumps({"format": FORMAT, "version": VERSION, "model": _plain(spec)}, indent=1, allow_nan=False)


def spec_from_json(text: str, where: str = "model spec") -> ModelSpec:
    """Read what `spec_to_json` wrote.

    Args:
        text: JSON.
        where: the file, for messages.

    Raises:
        SpecError: no JSON, of another format or version, or a key that is unknown, missing or of another type.
    """
    import json

    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(where, f"is not JSON: {error}.") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise SpecError(where, f'is no model spec: "format" must be "{FORMAT}".')
    if table.get("version") != VERSION or isinstance(table["version"], bool):
        near = "Trace the model again."
        raise SpecError(where, f"is of version {shown(table.get('version'))}, and {VERSION} is read here.", near)
    _require_keys(table, ("format", "version", "model"), (), where)
    made: ModelSpec = _read(table["model"], ModelSpec, f"{where}: model")
    return made


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists; everything else in a spec is JSON already."""
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _read(value: Any, kind: Any, where: str) -> Any:
    """A JSON value as the type that a field is declared with."""
    origin, inner = get_origin(kind), get_args(kind)
    kinds = inner if origin in (types.UnionType, Union) else (kind,)
    made = next((one for one in kinds if is_dataclass(one) and isinstance(one, type)), None)
    if made is not None:
        return None if value is None and types.NoneType in kinds else _read_dataclass(value, made, where)
    if origin is tuple:
        _require(isinstance(value, list), value, "a list", where)
        return tuple(_read(item, inner[0], f"{where}[{i}]") for i, item in enumerate(value))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        _require(isinstance(value, dict), value, "a table", where)
        return {name: _read(item, inner[1], f"{where}.{name}") for name, item in value.items()}
    if origin is Literal:
        _require(value in inner, value, f"one of {listed(inner)}", where)
        return value
    return _read_scalar(value, kinds, where)


def _read_dataclass(value: Any, kind: type, where: str) -> Any:
    _require(isinstance(value, dict), value, "a table", where)
    declared = fields(kind)
    optional = [f.name for f in declared if f.default is not MISSING or f.default_factory is not MISSING]
    required = [one.name for one in declared if one.name not in optional]
    _require_keys(value, required, optional, where)
    hints = get_type_hints(kind)
    return kind(**{name: _read(item, hints[name], f"{where}.{name}") for name, item in value.items()})


def _read_scalar(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    words = listed(kind.__name__ for kind in kinds if kind is not types.NoneType)
    fits = type(value) in kinds or (type(value) is int and float in kinds)
    _require(fits and not (isinstance(value, float) and not math.isfinite(value)), value, f"of type {words}", where)
    return float(value) if type(value) is int and int not in kinds else value


def _require(condition: bool, value: Any, wanted: str, where: str) -> None:
    if not condition:
        raise SpecError(where, f"is {shown(value)}, must be {wanted}.")


def _require_keys(table: Mapping[str, Any], required: Any, optional: Any, where: str) -> None:
    known = [*required, *optional]
    for name in table:
        if name not in known:
            near = closest(name, known)
            raise SpecError(f"{where}.{name}", "is no key of a model spec.", f"Nearest: {near}." if near else "")
    missing = [name for name in required if name not in table]
    if missing:
        raise SpecError(where, f"lacks {listed(missing, 'and')}.")
