"""`meshwright cluster`: the catalogue of devices and links, and one cluster with every figure and its source."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from meshwright.spec.cluster import Cluster, Device, Link, cluster_table
from meshwright.spec.find_cluster import find_cluster
from meshwright.spec.hardware import GIB, DeviceEntry, LinkEntry, devices, links


def cluster(options: argparse.Namespace) -> int:
    """Run the action that was asked for; returns the exit code.

    Args:
        options: `action` (`list`, `show`, or None, which lists), `name` (what `find_cluster` takes) and `json`.
    """
    if options.action == "show":
        return _show(find_cluster(options.name), options.json)
    return _list(options.json)


def _list(as_json: bool) -> int:
    boards = [entry for entry in devices().values() if not entry.is_open]
    if as_json:
        found = [_device_row(entry) for entry in boards]
        print(json.dumps({"devices": found, "links": [asdict(entry) for entry in links().values()]}, indent=1))
        return 0
    print(f"{'device':<22}{'memory':>11}{'bf16 peak':>11}{'bandwidth':>11}{'link':>11}{'node':>6}  trust")
    print(f"{'':<22}{'GiB':>11}{'TFLOP/s':>11}{'GB/s':>11}{'GB/s':>11}")
    for entry in boards:
        print(_device_line(entry))
    print(f"\n{'link':<22}{'GB/s':>11}")
    for link in links().values():
        print(_link_line(link))
    print("\nmeshwright cluster show 8xH100-SXM prints the figures of a cluster with their sources.")
    return 0


def _device_row(entry: DeviceEntry) -> dict[str, Any]:
    row = asdict(entry)
    return {"key": row.pop("key"), **(row.pop("device") or {}), **row}


def _device_line(entry: DeviceEntry) -> str:
    device = entry.device
    if device is None:
        return f"{entry.key:<22}{'-':>11}"
    peak = device.peak_flops.get("bf16") or device.peak_flops.get("fp16")
    mark = "*" if peak and "bf16" not in device.peak_flops else ""
    figures = [
        f"{device.memory_bytes / GIB:.2f}",
        _scaled(peak, 1e12) + mark,
        _scaled(device.memory_bytes_per_s, 1e9),
        _scaled(entry.scaleup_bytes_per_s or device.host_bytes_per_s, 1e9),
    ]
    cells = "".join(f"{figure:>11}" for figure in figures)
    return f"{entry.key:<22}{cells}{entry.devices_per_node or '-':>6}  {entry.trust}" + (
        "  * fp16: it has no bf16" if mark else ""
    )


def _link_line(entry: LinkEntry) -> str:
    each = "a node" if entry.is_per_node else "a device"
    return f"{entry.key:<22}{_scaled(entry.bytes_per_s, 1e9):>11} {each}, {entry.name}"


def _show(found: Cluster, as_json: bool) -> int:
    if as_json:
        print(json.dumps(cluster_table(found), indent=1))
        return 0
    print(f"{found.name}: {_count(found.nodes, 'node')} of {_count(found.devices_per_node, 'device')}")
    facts = list(_facts(found))
    for name, value, _ in facts:
        print(f"  {name:<18}{value}")
    print("sources")
    for name, _, source in facts:
        if source:
            print(f"  {name:<18}{source}")
    return 0


def _facts(found: Cluster) -> Iterable[tuple[str, str, str]]:
    yield from _device_facts(found.device)
    if found.devices_per_node > 1 or found.fast_devices > 1:
        yield "in a node", _link(found.intra), found.intra.source
    if found.fast_devices > found.devices_per_node:
        yield "that link joins", f"{found.fast_devices} devices", ""
    if found.nodes > 1:
        yield "between nodes", _link(found.inter), found.inter.source
    yield "origin", found.origin, ""


def _device_facts(device: Device) -> Iterable[tuple[str, str, str]]:
    yield "device", device.name, device.source
    yield "memory", f"{device.memory_bytes / GIB:.2f} GiB", device.memory_source
    if device.memory_bytes_per_s:
        yield "memory bandwidth", f"{device.memory_bytes_per_s / 1e9:,.0f} GB/s", ""
    for precision, flops in device.peak_flops.items():
        fraction = device.achieved_fraction(precision)
        best = f", {100 * fraction:.0f} % measured" if fraction else ""
        yield f"{precision} peak", f"{flops / 1e12:,.1f} TFLOP/s{best}", ""
    if device.host_bytes_per_s:
        yield "to the host", f"{device.host_bytes_per_s / 1e9:,.1f} GB/s", ""


def _link(link: Link) -> str:
    return f"{link.bandwidth_bytes_per_s / 1e9:,.2f} GB/s, {link.latency_s * 1e6:.1f} us, {link.name}"


def _scaled(amount: float | None, unit: float) -> str:
    return f"{amount / unit:,.5g}" if amount else "-"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
