"""Rejections: for each rule some layouts that break it, those that a user would try first; and how many there were."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import Final

import numpy as np

from meshwright.plan.ladder import fix_of
from meshwright.plan.option import Counts, Options, Purchase, Rejection, why
from meshwright.plan.rules import RULES
from meshwright.plan.search import Found, Indices
from meshwright.plan.setting import Setting

MOST: Final = 50
MEMORY: Final = "memory"


def count(found: Found) -> Counts:
    """How many candidates were considered, legal and fitting, and how many each rule rejected."""
    by_number = Counter(found.broken.tolist())
    rejected = {RULES[number - 1].name: by_number[number] for number in sorted(by_number) if number}
    legal, fitting = len(found.legal), int(np.count_nonzero(found.memory.fits))
    if legal > fitting:
        rejected[MEMORY] = legal - fitting
    return Counts(considered=len(found.broken), legal=legal, fitting=fitting, rejected=rejected)


def rejections(
    setting: Setting, found: Found, options: Options, purchase: Purchase | None, most: int = MOST
) -> tuple[Rejection, ...]:
    """A sample of what was rejected: each rule in turn, the simplest layout that it rejects first.

    Args:
        setting: the model, the batch and the cluster.
        found: the search.
        options: its explainer.
        purchase: the fewest devices that fit, which is the nearest where nothing here does.
        most: how many at most.
    """
    broken = [[(number, int(row)) for row in _firsts(found, number)] for number in range(1, len(RULES) + 1)]
    rows = [found.legal[place] for place in _misses_of(found)]
    misses = [(0, int(np.searchsorted(found.legal, row))) for row in _varied(found, np.array(rows, np.int64))]
    turns = [pair for turn in zip_longest(misses, *broken) for pair in turn if pair is not None][:most]
    made = []
    for number, at in sorted(turns, key=lambda pair: pair[0]):
        made.append(_broken(setting, found, number, at) if number else _misses(found, options, at, purchase))
    return tuple(made)


def _firsts(found: Found, number: int) -> Indices:
    """For each layout the first row that breaks that rule; layouts stand simplest first."""
    rows = np.flatnonzero(found.broken == number)
    return _varied(found, rows[np.unique(found.space.layout[rows], return_index=True)[1]])


def _misses_of(found: Found) -> Indices:
    """The best of each layout of which nothing fits; offload, which is planned, does not count."""
    best = found.best(np.asarray(found.columns.offload) == 0)
    misses: Indices = best[found.memory.fits[best] == 0]
    return misses


def _varied(found: Found, rows: Indices) -> Indices:
    """Plain data parallelism first; then of every combination of the other axes the simplest, then the next."""
    one = found.space.columns.take(rows)
    is_hybrid = (one.dp_replicate > 1) & (one.dp_shard > 1)
    axes = np.stack([one.tp, one.pp, one.cp, one.ep, is_hybrid + 1], axis=1)
    kind = np.unique(axes, axis=0, return_inverse=True)[1].reshape(-1)
    turn = np.where(axes.max(axis=1, initial=1) > 1, _places_in(kind), 0)
    return rows[np.argsort(turn, kind="stable")]


def _places_in(kind: Indices) -> Indices:
    """For each row how many rows of its kind come before it."""
    order = np.argsort(kind, kind="stable")
    starts = np.flatnonzero(np.diff(kind[order], prepend=-1))
    places = np.arange(len(kind)) - np.repeat(starts, np.diff(starts, append=len(kind)))
    found = np.empty_like(order)
    found[order] = places
    return found


def _broken(setting: Setting, found: Found, number: int, row: int) -> Rejection:
    rule, one = RULES[number - 1], found.space.columns.at(row)
    return Rejection(
        layout=one.word, rule=rule.name, because=rule.because(setting, one), nearest=rule.nearest(setting, one)
    )


def _misses(found: Found, options: Options, place: int, purchase: Purchase | None) -> Rejection:
    option = options.at(place)
    fix = fix_of(found, options, option, purchase)
    return Rejection(layout=option.word, rule=MEMORY, because=why(option), nearest=f"Nearest: {fix}", option=option)
