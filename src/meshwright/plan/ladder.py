"""The ladder: the rungs of the rule in order, the best candidate of each, and what would make it fit.

Start with DDP. Not enough memory: ZeRO. Still not: TP inside a node. Still not: PP between nodes. Rungs are looked at
without full recompute, which is the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.candidate import RECOMPUTE, Columns
from meshwright.cost.memory import estimate
from meshwright.plan.fixes import change, nearest_fitting
from meshwright.plan.option import Option, Options, Purchase, Rung, gib, option_of, why
from meshwright.plan.rules import RULES
from meshwright.plan.search import Found, is_planned
from meshwright.plan.setting import Setting

FULL: Final = RECOMPUTE.index("full")
Mask = NDArray[np.bool_]


def _stage(number: int) -> Callable[[Columns], Any]:
    return lambda c: (c.tp == 1) & (c.pp == 1) & (c.dp_replicate == 1) & (c.zero_stage == number)


MEMBERS: Final[Mapping[str, Callable[[Columns], Any]]] = {
    "ddp": lambda c: (c.tp == 1) & (c.pp == 1) & (c.dp_shard == 1),
    "zero1": _stage(1),
    "zero2": _stage(2),
    "zero3": _stage(3),
    "hsdp": lambda c: (c.tp == 1) & (c.pp == 1) & (c.dp_replicate > 1) & (c.dp_shard > 1),
    "tp": lambda c: (c.tp > 1) & (c.pp == 1),
    "pp": lambda c: c.pp > 1,
}
"""Rung -> which rows are on it, recompute and what is planned apart."""

NEEDS: Final[Mapping[str, str]] = {
    "zero1": "ZeRO cuts over at least 2 devices.",
    "zero2": "ZeRO cuts over at least 2 devices.",
    "zero3": "ZeRO cuts over at least 2 devices.",
    "hsdp": "HSDP needs at least 2 groups of at least 2 devices.",
    "tp": "TP cuts over at least 2 devices, and needs a model whose heads are known.",
    "pp": "a pipeline needs at least 2 devices.",
    "full recompute": "recompute is fixed to something else.",
}
"""Why a rung can have no rows at all."""

LOOKED_AT: Final = 4096
"""Rows of a rung without legal ones that are priced, to say what it would need."""


def ladder(
    setting: Setting, found: Found, options: Options, purchase: Purchase | None, *, named: bool = False
) -> tuple[Rung, ...]:
    """Every rung in the order of the rule.

    Args:
        setting: the model, the batch and the cluster.
        found: the search.
        options: its explainer.
        purchase: the fewest devices that fit, which is the fix where nothing here does.
        named: only named layouts were looked at: rungs without any are left out.
    """
    masks = rungs(found.columns)
    everything = rungs(found.space.columns)
    made = []
    for name, mask in masks.items():
        place = found.first(mask)
        if place is None:
            if name != "planned" and not (named and not everything[name].any()):
                made.append(_empty(setting, found, name, everything[name]))
        elif name != "planned" or (found.memory.fits[place] and all(rung.fits == "no" for rung in made)):
            made.append(_rung(found, options, name, place, purchase))
    return tuple(made)


def rungs(columns: Columns) -> dict[str, Mask]:
    """Which rows are on which rung; every row is on one."""
    n = len(columns)
    planned, full = np.broadcast_to(is_planned(columns), (n,)), np.broadcast_to(columns.recompute == FULL, (n,))
    plain = ~planned & ~full
    found = {name: np.asarray(members(columns) & plain) for name, members in MEMBERS.items()}
    return found | {"full recompute": full & ~planned, "planned": planned}


def _rung(found: Found, options: Options, name: str, place: int, purchase: Purchase | None) -> Rung:
    option = options.at(place)
    shown = "single" if name == "ddp" and option.candidate.world_size == 1 else name
    fix = "" if option.fits != "no" else fix_of(found, options, option, purchase)
    return Rung(name=shown, option=option, because=why(option), fix=fix)


def fix_of(found: Found, options: Options, option: Option, purchase: Purchase | None) -> str:
    """What would make it fit: the least change here, else more devices."""
    place = nearest_fitting(found, option.candidate)
    if place is not None:
        other = options.at(place)
        return f"{change(option, other)}: {gib(other.reserved_bytes)}."
    return bought(purchase) if purchase else "nothing on devices of this memory: a smaller model, or larger devices."


def bought(purchase: Purchase) -> str:
    """A purchase in words: `24 devices (3 nodes), as zero3x24: 61.2 GiB.`."""
    nodes = f" ({purchase.nodes} nodes)" if purchase.nodes > 1 else ""
    many = f"{purchase.num_devices:,} device{'s' if purchase.num_devices > 1 else ''}"
    return f"{many}{nodes}, as {purchase.option.phrase}: {gib(purchase.option.reserved_bytes)} each."


def _empty(setting: Setting, found: Found, name: str, mask: Mask) -> Rung:
    """A rung without a legal candidate: the rule that its first row breaks, and what it would need all the same."""
    rows = np.flatnonzero(mask)
    if not len(rows):
        return Rung(name=name, option=None, because=NEEDS.get(name, "there is no such layout here."), is_legal=False)
    columns, number = found.space.columns, int(found.broken[rows[0]])
    one, rule = columns.at(int(rows[0])), RULES[number - 1]
    because, nearest = rule.because(setting, one), rule.nearest(setting, one)
    if rule.name != "batch":
        return Rung(name=name, option=None, because=because, fix=nearest, is_legal=False)
    rows = rows[found.broken[rows] == number][:LOOKED_AT]
    needs = estimate(setting.job, columns.take(rows)).reserved_bytes
    option = option_of(setting.job, columns.at(int(rows[int(needs.argmin())])))
    return Rung(name=name, option=option, because=f"{because} {why(option)}", fix=nearest, is_legal=False)
