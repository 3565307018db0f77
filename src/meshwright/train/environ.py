"""The environment that a launcher gives to each rank: read once, checked as a whole, every number with its origin."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from meshwright.errors import Fault, SpecError

ROOM: Final = "MESHWRIGHT_ROOM"
TIMEOUT_S: Final = "MESHWRIGHT_TIMEOUT_S"
DEBUG: Final = "MESHWRIGHT_DEBUG"
DEFAULT_TIMEOUT_S: Final = 50.0
_ASKED: Final = "the environment of this process"
_START: Final = "Start the ranks with `meshwright train --nproc N`, meshwright.launch(main, nproc=N) or torchrun."
_OURS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place in the world, as its launcher said it.

    Attributes:
        rank: 0 .. world_size - 1 over all nodes.
        world_size: how many ranks there are.
        local_rank: which rank of this node, and so which of its devices.
        local_world_size: how many ranks this node has.
        node_rank: which node.
        launcher: `meshwright`, `torchrun`, `environment` (set by something else) or `none` (a world of one).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    launcher: str = "none"


def read_place(environ: Mapping[str, str] | None = None) -> Place | None:
    """The place that the environment gives to this process; None if no launcher started it.

    Raises:
        SpecError: the variables contradict each other; carries one fault for each contradiction.
    """
    environ = os.environ if environ is None else environ
    half = _half_set(environ)
    if half is not None:
        raise SpecError(half.where, half.rule, half.nearest, [half])
    if "RANK" not in environ:
        return None
    numbers, faults = _integers(environ)
    if not faults:
        place = _place(numbers, _launcher(environ))
        faults = _contradictions(place, environ)
        if not faults:
            return place
    rules = "; ".join(fault.rule for fault in faults)
    raise SpecError(_ASKED, rules, faults[0].nearest or _START, faults)


def check_nproc(nproc: int | None, place: Place, origin: str = "the nproc of launch") -> None:
    """Refuse a number of ranks that contradicts the world in which this process already is a rank."""
    if nproc is not None and nproc != place.world_size:
        who = {"torchrun": "set by torchrun", "meshwright": "set by meshwright's launcher"}.get(place.launcher, "")
        world = f"WORLD_SIZE={place.world_size} (from the environment{', ' + who if who else ''})"
        raise SpecError(
            f"nproc = {nproc} ({origin})",
            f"this process already is rank {place.rank} of {world}",
            f"Leave nproc out, or start {nproc} ranks.",
        )


def read_timeout_s(environ: Mapping[str, str] | None = None) -> float:
    """How long a collective may wait: what `launch` was told, else the default."""
    text = (os.environ if environ is None else environ).get(TIMEOUT_S, "")
    return float(text) if text else DEFAULT_TIMEOUT_S


def _half_set(environ: Mapping[str, str]) -> Fault | None:
    has_rank, has_world = "RANK" in environ, "WORLD_SIZE" in environ
    if has_rank and has_world:
        return None
    said = ", ".join(f"{name}={environ[name]}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environ)
    if said:
        missing = " and ".join(name for name, has in (("RANK", has_rank), ("WORLD_SIZE", has_world)) if not has)
        return Fault(_ASKED, f"{said} is set and {missing} is not", f"Set both, or neither. {_START}")
    tasks = environ.get("SLURM_NTASKS", "")
    if tasks.isdigit() and int(tasks) > 1:
        return Fault(
            _ASKED,
            f"SLURM_NTASKS={tasks} (from Slurm) and WORLD_SIZE is not set: each task would train alone.",
            "Start one task per node with `srun torchrun --nnodes N --nproc-per-node M ...`; in a batch script that"
            " runs once, unset SLURM_NTASKS.",
        )
    return None


def _integers(environ: Mapping[str, str]) -> tuple[dict[str, int], list[Fault]]:
    numbers: dict[str, int] = {}
    faults: list[Fault] = []
    for name in _OURS:
        text = environ.get(name)
        if text is None:
            continue
        try:
            numbers[name] = int(text)
        except ValueError:
            faults.append(Fault(name, f"{name}={text!r} is not an integer", ""))
    return numbers, faults


def _launcher(environ: Mapping[str, str]) -> str:
    if ROOM in environ:
        return "meshwright"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment"


def _place(numbers: Mapping[str, int], launcher: str) -> Place:
    rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=numbers.get("LOCAL_RANK", rank),
        local_world_size=numbers.get("LOCAL_WORLD_SIZE", world_size),
        node_rank=numbers.get("GROUP_RANK", 0),
        launcher=launcher,
    )


def _contradictions(place: Place, environ: Mapping[str, str]) -> list[Fault]:
    checks = [
        (place.world_size >= 1, "WORLD_SIZE", f"WORLD_SIZE={place.world_size} is below 1"),
        (place.rank >= 0, "RANK", f"RANK={place.rank} is below 0"),
        (
            place.rank < max(place.world_size, 1),
            "RANK",
            f"RANK={place.rank} is not below WORLD_SIZE={place.world_size}: ranks count from 0",
        ),
        (
            0 <= place.local_rank < place.local_world_size,
            "LOCAL_RANK",
            f"LOCAL_RANK={place.local_rank} is not below LOCAL_WORLD_SIZE={place.local_world_size}, or below 0",
        ),
        (
            place.local_world_size <= place.world_size,
            "LOCAL_WORLD_SIZE",
            f"LOCAL_WORLD_SIZE={place.local_world_size} is above WORLD_SIZE={place.world_size}",
        ),
    ]
    faults = [Fault(where, rule, "") for holds, where, rule in checks if not holds]
    return faults + (_meeting_point(environ) if place.world_size > 1 else [])


def _meeting_point(environ: Mapping[str, str]) -> list[Fault]:
    faults = [
        Fault(name, f"{name} is not set, and {environ['WORLD_SIZE']} ranks (WORLD_SIZE) must meet there", "")
        for name in ("MASTER_ADDR", "MASTER_PORT")
        if not environ.get(name)
    ]
    port = environ.get("MASTER_PORT", "")
    if port and not (port.isdigit() and 0 < int(port) < 65536):
        faults.append(Fault("MASTER_PORT", f"MASTER_PORT={port} is not a port (1..65535)", ""))
    return faults
