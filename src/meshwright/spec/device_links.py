"""The two links of a cluster, from its device in the catalogue; what that leaves out is assumed here, and says so."""

from __future__ import annotations

from typing import Final

from meshwright.spec.cluster import Device, Link
from meshwright.spec.device_names import find_link
from meshwright.spec.hardware import DeviceEntry, LinkEntry

ASSUMED_PCIE: Final = "PCIe4x16"
ASSUMED_NETWORK: Final = "ETH-100"
ASSUMED_ICI_BYTES_PER_S: Final = 100e9
_COLLECTIVE: Final = "latency: PyTorch 2.13, torch/distributed/tensor/_collective_utils.py"
SCALEUP_LATENCY: Final = (7.2e-6, f"{_COLLECTIVE}, 6.6 us a call + 0.6 us a hop over NVLink")
NETWORK_LATENCY: Final = (9.3e-6, f"{_COLLECTIVE}, 6.6 us a call + 2.7 us a hop between hosts")
BUS_LATENCY: Final = (10e-6, "latency assumed")
ETHERNET_LATENCY: Final = (30e-6, "latency assumed")


def links_of(entry: DeviceEntry, devices_per_node: int) -> tuple[Link, Link]:
    """The link in a node and the link between nodes, per device.

    Args:
        entry: the device.
        devices_per_node: of the cluster; a bridge of two GPUs is no link for more, and they share a node's adapter.
    """
    return _intra(entry, devices_per_node), _inter(entry, devices_per_node)


def default_links(device: Device, devices_per_node: int) -> tuple[Link, Link]:
    """Both links of a device that no catalogue knows: its bus to the host, and 100 Gb/s Ethernet; both assumed."""
    return _bus(device.host_bytes_per_s, "", None), _ethernet(devices_per_node)


def named_link(text: str, devices_per_node: int) -> Link:
    """A link of the catalogue by its key, per device of a node with so many.

    Raises:
        CatalogError: there is none.
    """
    entry = find_link(text)
    share = devices_per_node if entry.is_per_node else 1
    latency_s, latency_source = _latency(entry)
    return Link(
        entry.bytes_per_s / share,
        latency_s,
        name=entry.key,
        achieved_bytes_per_s=entry.achieved_bytes_per_s / share if entry.achieved_bytes_per_s else None,
        source=_joined(entry.source, latency_source),
    )


def _intra(entry: DeviceEntry, devices_per_node: int) -> Link:
    host_bytes_per_s = entry.device.host_bytes_per_s if entry.device else None
    is_bridge = "2-GPU" in entry.scaleup_name
    if entry.scaleup_bytes_per_s and not (is_bridge and devices_per_node > 2):
        return Link(
            entry.scaleup_bytes_per_s,
            SCALEUP_LATENCY[0],
            name=entry.scaleup_name,
            achieved_bytes_per_s=entry.achieved_one_node,
            source=_joined(entry.source, entry.link_source, SCALEUP_LATENCY[1]),
        )
    if entry.scaleup_name.startswith("ICI"):
        source = _joined("bandwidth assumed: the catalogue has none", SCALEUP_LATENCY[1])
        return Link(ASSUMED_ICI_BYTES_PER_S, SCALEUP_LATENCY[0], name=entry.scaleup_name, source=source)
    return _bus(host_bytes_per_s, entry.source, entry.achieved_one_node)


def _bus(host_bytes_per_s: float | None, source: str, achieved: float | None) -> Link:
    """Devices without a link of their own talk over the host's bus."""
    latency_s, latency_source = BUS_LATENCY
    if host_bytes_per_s is None:
        assumed = find_link(ASSUMED_PCIE)
        source = _joined(f"assumed {ASSUMED_PCIE}", latency_source)
        return Link(assumed.bytes_per_s, latency_s, name=assumed.key, source=source)
    source = _joined(source, latency_source)
    return Link(host_bytes_per_s, latency_s, name="host bus", achieved_bytes_per_s=achieved, source=source)


def _inter(entry: DeviceEntry, devices_per_node: int) -> Link:
    if entry.node_bytes_per_s is None:
        return _ethernet(devices_per_node)
    # Such nodes have an adapter for each device, or for each pair: a job on half of the devices has half of them.
    share = entry.devices_per_node or devices_per_node
    return Link(
        entry.node_bytes_per_s / share,
        NETWORK_LATENCY[0],
        name="network",
        achieved_bytes_per_s=entry.achieved_multi_node / share if entry.achieved_multi_node else None,
        source=_joined(entry.source, entry.link_source, NETWORK_LATENCY[1]),
    )


def _ethernet(devices_per_node: int) -> Link:
    link = named_link(ASSUMED_NETWORK, devices_per_node)
    return Link(
        link.bandwidth_bytes_per_s,
        link.latency_s,
        name=link.name,
        achieved_bytes_per_s=link.achieved_bytes_per_s,
        source=_joined("assumed: 100 Gb/s Ethernet for a whole node", link.source),
    )


def _latency(entry: LinkEntry) -> tuple[float, str]:
    if entry.key.startswith("ETH"):
        return ETHERNET_LATENCY
    if entry.key.startswith("PCIe"):
        return BUS_LATENCY
    return NETWORK_LATENCY if entry.is_per_node else SCALEUP_LATENCY


def _joined(*sources: str) -> str:
    return "; ".join(filter(None, sources))
