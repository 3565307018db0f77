"""What to buy: the fewest devices of the cluster's kind on which a workload fits.

Memory falls with microbatch size, with recompute and, without a pipeline, with reducing at every microbatch, so the
setting of the knobs that needs least decides: if it does not fit, no other does. All legal degrees of tp, pp and data
parallelism are tried, fewest devices first: a whole part of a node, or whole nodes. HSDP, cp, ep and offload are left
out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

import numpy as np

from meshwright.cost.memory import estimate
from meshwright.plan.option import Purchase, option_of
from meshwright.plan.rules import first_broken
from meshwright.plan.search import rung_of
from meshwright.plan.setting import Setting, legal_tp
from meshwright.plan.space import Cut, Knobs, spread
from meshwright.spec.cluster import Cluster
from meshwright.spec.nearest import divisors

AT_ONCE: Final = 2048
"""Layouts that are priced together."""

USUAL_NODE: Final = 8
"""Devices of a server, where the cluster is smaller."""


def fewest_devices(setting: Setting, knobs: Knobs) -> Purchase | None:
    """The fewest devices on which the workload fits.

    Args:
        setting: the model, the batch and a cluster of the kind in question; how many nodes it has does not matter.
        knobs: what the user has fixed.

    Returns:
        None if no number is enough; or for CPU processes, which share a machine's memory.
    """
    if setting.cluster.device.kind == "cpu":
        return None
    setting = replace(setting, cluster=_many_nodes(setting))
    least = Knobs(
        microbatch_size=knobs.microbatch_size or 1,
        recompute=knobs.recompute or "full",
        sync=knobs.sync,
        schedule=knobs.schedule or "1f1b",
        offload="none",
    )
    cuts = sorted(_cuts(setting, least), key=lambda cut: cut[0] * cut[1] * cut[3] * cut[4])
    pieces = (cuts[start : start + AT_ONCE] for start in range(0, len(cuts), AT_ONCE))
    return next((found for piece in pieces if (found := _first_fitting(setting, piece, least))), None)


def _many_nodes(setting: Setting) -> Cluster:
    """As many nodes as any legal layout could use. A single node may be a part of one: it grows to a usual one."""
    cluster, job = setting.cluster, setting.job
    per_node = cluster.devices_per_node if cluster.nodes > 1 else max(cluster.devices_per_node, USUAL_NODE)
    return replace(cluster, devices_per_node=per_node, nodes=max(job.model.n_layers, 1) * job.global_batch_size)


def _cuts(setting: Setting, knobs: Knobs) -> Iterator[Cut]:
    """Every layout that could hold the states, has a microbatch for each stage, and fills a part of a node or nodes."""
    job, per_node = setting.job, setting.cluster.devices_per_node
    states = job.states.total_bytes * (job.model.num_parameters - job.model.frozen_parameters)
    least = states / max(job.capacity_bytes, 1)
    degrees = legal_tp(setting) if job.model.n_heads else [1]
    for tp, pp, ranks in product(degrees, range(1, max(job.model.n_layers, 1) + 1), divisors(job.global_batch_size)):
        world = tp * pp * ranks
        if world < least or (world % per_node and per_node % world):
            continue
        if knobs.schedule == "1f1b" and pp * ranks * (knobs.microbatch_size or 1) > job.global_batch_size:
            continue
        yield ranks, 1, 0, tp, pp, 1, 1
        for stage in (1, 2, 3) if ranks > 1 else ():
            yield 1, ranks, stage, tp, pp, 1, 1


def _first_fitting(setting: Setting, cuts: Sequence[Cut], knobs: Knobs) -> Purchase | None:
    columns = spread(cuts, setting.job.global_batch_size, knobs).columns
    columns = columns.take(first_broken(setting, columns) == 0)
    if not len(columns.tp):
        return None
    fits = estimate(setting.job, columns).fits
    columns = columns.take(fits > 0)
    if not len(columns.tp):
        return None
    best = int(np.lexsort((rung_of(columns), 2 - fits[fits > 0], columns.world_size))[0])
    one = columns.at(best)
    nodes = -(-one.world_size // setting.cluster.devices_per_node)
    return Purchase(num_devices=one.world_size, nodes=nodes, option=option_of(setting.job, one))
