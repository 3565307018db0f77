"""What a workload runs on: devices, the links between them, and how many of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import SpecError
from meshwright.spec.numbers import check_amount


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one CPU process.

    Attributes:
        memory_bytes: capacity.
        peak_flops: dense operations per second by precision (`fp32`, `bf16`, ...), as the vendor states them.

    Raises:
        SpecError: an amount is negative or not finite, or a peak is 0.
    """

    memory_bytes: int
    peak_flops: Mapping[str, float]

    def __post_init__(self) -> None:
        """Refuse what no device has."""
        check_amount("device.memory_bytes", self.memory_bytes)
        for precision, flops in self.peak_flops.items():
            check_amount(f"device.peak_flops.{precision}", flops, positive=True)


@dataclass(frozen=True, slots=True)
class Link:
    """What two neighbours talk over, in one direction.

    Attributes:
        bandwidth_bytes_per_s: per device.
        latency_s: of one message.

    Raises:
        SpecError: the bandwidth is not above 0, or the latency is negative.
    """

    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        """Refuse what no link has."""
        check_amount("link.bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, positive=True)
        check_amount("link.latency_s", self.latency_s)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes of equal devices.

    Attributes:
        nodes: machines, >= 1.
        devices_per_node: devices in each, >= 1.
        device: what each of them is.
        intra: link between devices of a node.
        inter: link between devices of two nodes.

    Raises:
        SpecError: a count below 1.
    """

    nodes: int
    devices_per_node: int
    device: Device
    intra: Link
    inter: Link

    def __post_init__(self) -> None:
        """Refuse an empty cluster."""
        for name in ("nodes", "devices_per_node"):
            if getattr(self, name) < 1:
                raise SpecError(f"cluster.{name}", f"is {getattr(self, name)}, must be at least 1.", "Nearest: 1.")

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node
