"""What a workload runs on: devices, the links between them, and how many of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

from meshwright.errors import SpecError
from meshwright.spec.numbers import check_amount


def cluster_table(cluster: Cluster) -> dict[str, Any]:
    """A cluster with every figure and its source, as plain dicts for JSON."""
    counts = {"name": cluster.name, "num_devices": cluster.num_devices, "fast_devices": cluster.fast_devices}
    return counts | asdict(cluster)


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one CPU process.

    Attributes:
        memory_bytes: capacity: what a process sees of the device, before its own context takes a part.
        peak_flops: dense operations per second by precision (`fp32`, `bf16`, ...), as the vendor states them.
        key: of the catalogue; empty for a device that is not in it.
        name: in words.
        kind: gpu | accelerator | tpu | cpu.
        memory_bytes_per_s: bandwidth of that memory; None where unknown.
        achieved_flops: the best matrix products that were measured, per second by precision.
        host_bytes_per_s: to and from the host, one direction; None where unknown.
        memory_source: where the capacity comes from.
        source: where the other figures come from.

    Raises:
        SpecError: an amount is negative or not finite, or a rate is 0.
    """

    memory_bytes: int
    peak_flops: Mapping[str, float]
    _: KW_ONLY
    key: str = ""
    name: str = ""
    kind: str = "gpu"
    memory_bytes_per_s: float | None = None
    achieved_flops: Mapping[str, float] = field(default_factory=dict)
    host_bytes_per_s: float | None = None
    memory_source: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse what no device has."""
        check_amount("device.memory_bytes", self.memory_bytes)
        for table in ("peak_flops", "achieved_flops"):
            for precision, flops in getattr(self, table).items():
                check_amount(f"device.{table}.{precision}", flops, positive=True)
        for rate in ("memory_bytes_per_s", "host_bytes_per_s"):
            if getattr(self, rate) is not None:
                check_amount(f"device.{rate}", getattr(self, rate), positive=True)

    def achieved_fraction(self, precision: str) -> float | None:
        """Share of the peak that measured matrix products reach; None where one of the two is unknown."""
        if precision not in self.achieved_flops or precision not in self.peak_flops:
            return None
        return self.achieved_flops[precision] / self.peak_flops[precision]


@dataclass(frozen=True, slots=True)
class Link:
    """What two neighbours talk over, in one direction.

    Attributes:
        bandwidth_bytes_per_s: per device.
        latency_s: of one message.
        name: such as `NVLink4`.
        achieved_bytes_per_s: bus bandwidth that an all-reduce was measured to reach, per device; None where unknown.
            With sums in the switches it can exceed the bandwidth.
        source: where the figures come from, or that they are assumed.

    Raises:
        SpecError: a bandwidth is not above 0, or the latency is negative.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    _: KW_ONLY
    name: str = ""
    achieved_bytes_per_s: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse what no link has."""
        check_amount("link.bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, positive=True)
        check_amount("link.latency_s", self.latency_s)
        if self.achieved_bytes_per_s is not None:
            check_amount("link.achieved_bytes_per_s", self.achieved_bytes_per_s, positive=True)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes of equal devices.

    Attributes:
        nodes: machines, >= 1.
        devices_per_node: devices in each, >= 1.
        device: what each of them is.
        intra: link between devices of a node.
        inter: link between devices of two nodes.
        scaleup_devices: devices that `intra` joins where it reaches past a node (72 in an NVL72 rack); None for a node.
        origin: `catalogue`, `local` (this machine), or the path of the file that describes it.

    Raises:
        SpecError: a count below 1, or `intra` joins fewer devices than a node has.
    """

    nodes: int
    devices_per_node: int
    device: Device
    intra: Link
    inter: Link
    _: KW_ONLY
    scaleup_devices: int | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        """Refuse an empty cluster."""
        for name in ("nodes", "devices_per_node"):
            if getattr(self, name) < 1:
                raise SpecError(f"cluster.{name}", f"is {getattr(self, name)}, must be at least 1.", "Nearest: 1.")
        if self.scaleup_devices is not None and self.scaleup_devices < self.devices_per_node:
            rule = f"is {self.scaleup_devices}; a node alone has {self.devices_per_node} devices."
            raise SpecError("cluster.scaleup_devices", rule, f"Nearest: {self.devices_per_node}.")

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def fast_devices(self) -> int:
        """Devices that `intra` joins: the most that TP should span."""
        return min(self.scaleup_devices or self.devices_per_node, self.num_devices)

    @property
    def name(self) -> str:
        """Nodes x devices x kind, as `find_cluster` reads it for kinds of the catalogue: `4x8xH100-SXM-80GB`."""
        counts = [self.nodes, self.devices_per_node] if self.nodes > 1 else [self.devices_per_node]
        return "x".join([*map(str, counts), self.device.key or self.device.name or "device"])
