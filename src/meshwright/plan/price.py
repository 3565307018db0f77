"""The price of a candidate, in rough seconds: one number for bytes sent, recompute and bubbles, to compare on one rung.

    price = C (1 + again) / (1 - idle) + sum over axes of bytes sent / bandwidth

C is the computation of a step on one device at the rate of its data sheet (or the best that was measured), `again`
the share that recompute adds, `idle` the share of waiting in a pipeline (spec/pipeline.py; of those that part backward
passes (pp - 1) / (3 v m + pp - 1), as they have from 2 pp - 1 microbatches up), and nothing is hidden behind
anything. It orders candidates that are alike, and no more:
it is no prediction, is never shown, and goes once step time is predicted.

Bubbles: Narayanan et al., arXiv 2104.04473, section 2.2. Shares of recompute: Korthikanti et al., arXiv 2205.05198,
table 4, milliseconds of a layer of the 22B model.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.candidate import PARTED, Column, Columns
from meshwright.cost.quantities import Job
from meshwright.cost.traffic import AXES, Traffic
from meshwright.spec.cluster import Cluster, Device
from meshwright.spec.model_spec import ModelSpec

AGAIN: Final = (0.0, 20.3 / 19.0 - 1, 27.2 / 19.6 - 1)
"""Share of computation that recompute adds: none, selective, full."""

UNKNOWN_FLOPS: Final = {"cpu": 5e10, "gpu": 1e14}
"""Per second, where no data sheet says it: a few CPU cores, a server's GPU of about 2018."""

UNKNOWN_HOST_BYTES_PER_S: Final = 25e9
"""PCIe 4 x16, four fifths of it."""


def price_s(job: Job, cluster: Cluster, columns: Columns, sent: Traffic) -> NDArray[np.float64]:
    """The price of candidates, in seconds.

    Args:
        job: what is trained.
        cluster: its rates.
        columns: the candidates.
        sent: what they send.
    """
    flops = job.global_batch_size * job.seq_len * flops_per_token(job.model)
    compute = flops / rate_of(cluster.device, job.model.compute) / columns.world_size
    again = np.asarray(AGAIN)[columns.recompute]
    thirds = np.where(np.isin(columns.schedule, PARTED), 3, 1)
    slots = columns.num_microbatches * columns.chunks * thirds
    busy = compute * (1 + again) * (slots + columns.pp - 1) / slots
    waits = [amount / bandwidth(name, cluster, columns) for name, amount in zip(AXES, sent.by_axis, strict=True)]
    priced: NDArray[np.float64] = busy + np.sum(waits, axis=0)
    return priced


def flops_per_token(model: ModelSpec) -> float:
    """Of forward and backward: 6 for each weight of a matrix product, 12 a pair of places and width, half of them."""
    products = sum(unit.count * (unit.matmul_parameters or unit.parameters) for unit in model.units)
    width = sum(unit.count * unit.attention_width for unit in model.units)
    weights = products + model.d_model * model.vocab_size or max(model.num_parameters, 1)
    return 6.0 * weights + 6.0 * width * model.seq_len


def rate_of(device: Device, compute: str) -> float:
    """FLOP per second: the best measured, else the data sheet's, else a guess by kind."""
    known = device.achieved_flops.get(compute) or device.peak_flops.get(compute)
    return known or UNKNOWN_FLOPS.get(device.kind, UNKNOWN_FLOPS["gpu"])


def bandwidth(axis: str, cluster: Cluster, columns: Columns) -> Column:
    """Bytes per second of one rank on the slowest link of its group: fast where the group stays inside a node."""
    if axis == "host":
        return cluster.device.host_bytes_per_s or UNKNOWN_HOST_BYTES_PER_S
    c = columns
    inner = c.tp * c.cp
    span = {
        "tensor": c.tp,
        "context": inner,
        "expert": inner * c.ep,
        "data": inner * np.where(np.asarray(c.zero_stage) == 0, c.dp_replicate, c.dp_shard),
        "replicas": inner * c.dp_shard * c.dp_replicate,
        "pipeline": c.world_size,
    }[axis]
    inside = cluster.intra.bandwidth_bytes_per_s, cluster.inter.bandwidth_bytes_per_s
    return np.where(np.asarray(span) <= cluster.fast_devices, *inside)
