"""A cluster from what the user said: nodes x devices x kind, a file or this machine; or from a recipe's `[cluster]`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from meshwright.errors import CatalogError, SpecError
from meshwright.spec.cluster import Cluster
from meshwright.spec.device_links import links_of
from meshwright.spec.device_names import find_device
from meshwright.spec.hardware import DeviceEntry
from meshwright.spec.local_cluster import LOCAL, local_cluster
from meshwright.spec.nearest import multiples_around, shown

if TYPE_CHECKING:
    from meshwright.spec.sections import ClusterSection

CATALOGUE: Final = "catalogue"
MOST_PER_NODE: Final = 16
"""Devices of the largest usual servers, where the catalogue states no number."""

_WORD: Final = re.compile(r"\s*(?:([0-9]{1,7})\s*[x*]\s*)?(?:([0-9]{1,7})\s*[x*]\s*)?(\S.*?)\s*", re.IGNORECASE)


def find_cluster(text: str) -> Cluster:
    """The cluster that a word means.

    Args:
        text: `4x8xA100-80GB` (nodes x devices x kind), `8xH100-SXM` (one node), `H100-SXM` (one device), the path of a
            TOML file (docs of its keys: cluster_file.py), or `local` (this machine).

    Raises:
        SpecError: more devices than a node has, a count of 0, or a file that describes no cluster.
        CatalogError: a kind that the catalogue does not know.
    """
    if text.strip().lower() == LOCAL:
        return local_cluster()
    if text.strip().lower().endswith(".toml"):
        from meshwright.spec.cluster_file import read_cluster

        return read_cluster(text.strip())
    found = _WORD.fullmatch(text)
    if found is None:
        raise CatalogError(f"cluster {shown(text)}", "names no device.", "Such as 8xH100-SXM, 4x8xA100-80GB or local.")
    first, second, kind = found.groups()
    nodes, devices_per_node = (first, second) if second else ("1", first or "1")
    return cluster_of(_device(text, kind), int(nodes), int(devices_per_node))


def cluster_of(entry: DeviceEntry, nodes: int, devices_per_node: int) -> Cluster:
    """Nodes of a device of the catalogue.

    Raises:
        SpecError: more devices than a node has, or a count below 1.
    """
    limit = entry.devices_per_node or MOST_PER_NODE
    if devices_per_node > limit:
        asked = f"{nodes}x{devices_per_node}x{entry.key}" if nodes > 1 else f"{devices_per_node}x{entry.key}"
        node = "a node" if entry.devices_per_node else "the largest usual server"
        rule = f"{node} of {entry.key} has {limit} devices, not {devices_per_node}."
        raise SpecError(f'cluster "{asked}"', rule, _nearest(entry.key, nodes * devices_per_node, limit))
    if entry.device is None:
        raise CatalogError(f"device {shown(entry.key)}", "has no stated memory, so nothing can be planned for it.")
    # A count below 1 is the cluster's own fault to find; links are per device of at least one.
    intra, inter = links_of(entry, max(devices_per_node, 1))
    return Cluster(
        nodes,
        devices_per_node,
        entry.device,
        intra,
        inter,
        scaleup_devices=entry.scaleup_devices,
        origin=CATALOGUE,
    )


def cluster_of_section(section: ClusterSection) -> Cluster:
    """The cluster of a recipe's `[cluster]`.

    What is left out: the device is this machine's; the devices in a node are those of this machine, or, with a device
    given, those of its usual node.

    Raises:
        SpecError: as `find_cluster`, and more GPUs than this machine has.
    """
    if section.device is None:
        return replace(local_cluster(section.devices_per_node), nodes=section.nodes)
    if section.device.lower().endswith(".toml"):
        cluster = find_cluster(section.device)
        return replace(
            cluster, nodes=section.nodes, devices_per_node=section.devices_per_node or cluster.devices_per_node
        )
    entry = find_device(section.device)
    return cluster_of(entry, section.nodes, section.devices_per_node or entry.devices_per_node or 1)


def section_of_cluster(cluster: Cluster) -> ClusterSection:
    """The `[cluster]` that `cluster_of_section` reads back as this cluster; all left out for this machine."""
    from meshwright.spec.sections import ClusterSection  # 0.02 s that a word alone need not pay.

    if cluster.origin == LOCAL:
        return ClusterSection(nodes=cluster.nodes)
    device = cluster.device.key if cluster.origin == CATALOGUE else cluster.origin
    return ClusterSection(nodes=cluster.nodes, devices_per_node=cluster.devices_per_node, device=device)


def _device(text: str, kind: str) -> DeviceEntry:
    try:
        return find_device(kind)
    except CatalogError as error:
        if text.strip() == kind:
            raise
        raise CatalogError(f"cluster {shown(text)}", f"{error.asked} {error.rule}", error.nearest) from None


def _nearest(key: str, wanted: int, limit: int) -> str:
    """Whole nodes with the same number of devices, else the nearest below and above."""
    totals = [wanted] if wanted % limit == 0 else multiples_around(wanted, limit)
    words = [f"{total // limit}x{limit}x{key}" if total > limit else f"{limit}x{key}" for total in totals]
    return f"Nearest: {' or '.join(words)}."
