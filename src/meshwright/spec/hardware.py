"""The catalogue of devices and links: data/hardware.csv, and hardware_more.csv for what it lacks; each figure sourced.

Units of the files are the vendors': GB/s and TFLOP/s are powers of ten, one direction, dense. Memory is another matter:
the "80 GB" of a board are neither 80 * 10^9 nor 80 * 2^30 bytes. A capacity here is what a process sees of the device
(PyTorch's "total capacity"); where no reading was found it is the printed figure in GiB.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from meshwright.spec.cluster import Device

GIB: Final = 2**30
PEAKS: Final = ("bf16", "fp16", "tf32", "fp8", "fp4")


@cache
def devices() -> Mapping[str, DeviceEntry]:
    """Every device of the catalogue by its key."""
    more = {row["key"]: row for row in _rows("hardware_more.csv")}
    rows = [row for row in _rows("hardware.csv") if not row["kind"].startswith("link")]
    return {row["key"]: _entry(row | _prefixed(more.get(row["key"], {}))) for row in rows}


@cache
def links() -> Mapping[str, LinkEntry]:
    """Every link of the catalogue by its key."""
    rows = [row for row in _rows("hardware.csv") if row["kind"].startswith("link")]
    return {row["key"]: _link_entry(row) for row in rows}


def _rows(name: str) -> list[dict[str, str]]:
    import csv  # Most commands name no cluster.

    path = os.path.join(os.path.dirname(__file__), "data", name)
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _prefixed(row: Mapping[str, str]) -> dict[str, str]:
    return {f"more_{name}": text for name, text in row.items()}


def _entry(row: Mapping[str, str]) -> DeviceEntry:
    per_node = _number(row, "devices_per_node")
    domain = _number(row, "more_scaleup_devices")
    # A board with several dies is as many devices to software, each with its share.
    dies = int(_number(row, "more_devices_per_board") or 1)
    return DeviceEntry(
        key=row["key"],
        vendor=row["vendor"],
        year=int(row["year"]),
        device=_device(row, dies),
        is_open="placeholder" in row["source"],
        devices_per_node=int(per_node) if per_node else None,
        scaleup_name=row["scaleup_link"],
        scaleup_bytes_per_s=_either(row, "scaleup_gb_s_unidir_per_gpu", 1e9 / dies),
        scaleup_devices=int(domain) if domain else None,
        node_bytes_per_s=_either(row, "scaleout_gb_s_unidir_per_node", 1e9),
        achieved_one_node=_number(row, "achieved_allreduce_busbw_gb_s_one_node", 1e9 / dies),
        achieved_multi_node=_number(row, "achieved_allreduce_busbw_gb_s_multi_node", 1e9),
        driver_names=tuple(filter(None, row.get("more_driver_names", "").split("|"))),
        link_source=row.get("more_link_source", ""),
        source=row["source"].strip("; "),
        trust=row["trust"],
        notes=row["notes"],
    )


def _device(row: Mapping[str, str], dies: int) -> Device | None:
    printed, visible = _number(row, "mem_gb"), _number(row, "more_visible_gib")
    if printed is None:
        return None
    peaks = {precision: _number(row, f"peak_{precision}_dense_tflops", 1e12 / dies) for precision in PEAKS}
    achieved = {p: _number(row, f"achieved_matmul_{p}_tflops", 1e12 / dies) for p in ("bf16", "fp8")}
    return Device(
        memory_bytes=round((visible or printed / dies) * GIB),
        peak_flops={precision: flops for precision, flops in peaks.items() if flops},
        key=row["key"],
        name=row["name"] + (f", one of {dies} dies" if dies > 1 else ""),
        kind=row["kind"],
        memory_bytes_per_s=_number(row, "mem_bw_gb_s", 1e9 / dies),
        achieved_flops={precision: flops for precision, flops in achieved.items() if flops},
        host_bytes_per_s=_number(row, "host_link_gb_s_unidir", 1e9 / dies),
        memory_source=row["more_visible_source"] if visible else "the printed GB, read as GiB; no reading found",
        source=row["source"].strip("; "),
    )


def _link_entry(row: Mapping[str, str]) -> LinkEntry:
    is_intra = row["kind"] == "link-intra"
    figure = "scaleup_gb_s_unidir_per_gpu" if is_intra else "scaleout_gb_s_unidir_per_node"
    return LinkEntry(
        key=row["key"],
        name=row["name"],
        bytes_per_s=float(row[figure]) * 1e9,
        # The one link between nodes that is stated per device says so in its notes.
        is_per_node=not is_intra and "figure is per GPU" not in row["notes"],
        achieved_bytes_per_s=_number(row, "achieved_allreduce_busbw_gb_s_multi_node", 1e9),
        source=row["source"],
        notes=row["notes"],
    )


def _number(row: Mapping[str, str], column: str, unit: float = 1.0) -> float | None:
    text = row.get(column, "")
    return float(text) * unit if text else None


def _either(row: Mapping[str, str], column: str, unit: float) -> float | None:
    return _number(row, column, unit) or _number(row, f"more_{column}", unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    """A device of the catalogue, with the links that it comes with.

    Attributes:
        key: its name in files and on the command line.
        vendor: who makes it.
        year: of its release.
        device: itself; None where the memory is not stated.
        is_open: the row stands for runs that do not say which board they used; nothing can be planned for it.
        devices_per_node: in the usual node; None where it is a card for any server.
        scaleup_name: link between the devices of a node.
        scaleup_bytes_per_s: of it, per device; None where they talk over the host's bus.
        scaleup_devices: devices that it joins; None for those of a node.
        node_bytes_per_s: network of a whole node; None where it is not stated.
        achieved_one_node: bus bandwidth of an all-reduce in a node.
        achieved_multi_node: bus bandwidth of an all-reduce over nodes, of a whole node.
        driver_names: what the driver calls it, without the vendor.
        link_source: where those link figures come from that `source` does not give.
        source: where the figures come from.
        trust: A (primary table), B (second-hand or rounded), C (sources disagree).
        notes: what else there is to know.
    """

    key: str
    vendor: str
    year: int
    device: Device | None
    is_open: bool
    devices_per_node: int | None
    scaleup_name: str
    scaleup_bytes_per_s: float | None
    scaleup_devices: int | None
    node_bytes_per_s: float | None
    achieved_one_node: float | None
    achieved_multi_node: float | None
    driver_names: tuple[str, ...]
    link_source: str
    source: str
    trust: str
    notes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEntry:
    """A link of the catalogue.

    Attributes:
        key: its name in files.
        name: in words.
        bytes_per_s: one direction, of a device or of a whole node.
        is_per_node: which of the two.
        achieved_bytes_per_s: bus bandwidth of an all-reduce, of the same; None where it was not measured.
        source: where the figures come from.
        notes: what else there is to know.
    """

    key: str
    name: str
    bytes_per_s: float
    is_per_node: bool
    achieved_bytes_per_s: float | None
    source: str
    notes: str
