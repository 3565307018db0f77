"""A cluster from a TOML file. Unknown keys are refused with the nearest; every fault is reported at once.

    nodes = 4
    devices_per_node = 8
    device = "H100-SXM"                 # of the catalogue; or a table:
    [device]
    like = "A100-80GB"                  # optional: figures of the catalogue for what is left out
    name = "A100 64GB"
    memory_gib = 63.4                   # required without `like`
    memory_bandwidth_gb_per_s = 1640
    peak_bf16_tflops = 312              # and peak_fp16, peak_tf32, peak_fp8, peak_fp4, peak_fp32
    host_bandwidth_gb_per_s = 31
    [intra]                             # or: intra = "NVLink3", a link of the catalogue
    bandwidth_gb_per_s = 300            # per device, one direction
    latency_us = 7.2
    [inter]                             # or: inter = "IB-HDR-8x200"
    bandwidth_gb_per_s = 25

Links that are left out are the device's own, else assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any, Final

from meshwright.errors import CatalogError, Fault, SpecError
from meshwright.spec.cluster import Cluster, Device, Link
from meshwright.spec.device_links import BUS_LATENCY, ETHERNET_LATENCY, default_links, links_of, named_link
from meshwright.spec.device_names import find_device
from meshwright.spec.hardware import GIB, DeviceEntry
from meshwright.spec.keys import Table, about, key
from meshwright.spec.nearest import closest, shown
from meshwright.spec.values import converted, value_fault

OWN: Final = "as the file says"
MOST: Final = 1e9
"""Past this a figure is a slip of units, not a device."""
PEAKS: Final = ("bf16", "fp16", "tf32", "fp8", "fp4", "fp32")
MEANT: Final[Mapping[str, str]] = {
    "memory_gb": "memory_gib, in units of 2^30 bytes: nvidia-smi's MiB / 1024",
    "memory": "memory_gib, in units of 2^30 bytes: nvidia-smi's MiB / 1024",
    "memory_mib": "memory_gib, in units of 2^30 bytes: nvidia-smi's MiB / 1024",
    "gpus": "devices_per_node",
    "gpus_per_node": "devices_per_node",
    "num_nodes": "nodes",
    "gpu": "device",
    "links": "intra and inter",
}
"""Other spellings of a key, and what to say here."""


def read_cluster(path: str) -> Cluster:
    """The cluster that a file describes.

    Raises:
        SpecError: the file cannot be read, is not TOML or describes no cluster; `faults` holds all that is wrong.
    """
    return cluster_from_table(_table_of(path), path)


def cluster_from_table(table: Table, where: str = "cluster") -> Cluster:
    """The cluster that a table describes; `where` names it in messages and is its origin.

    Raises:
        SpecError: it describes none; `faults` holds all that is wrong.
    """
    faults: list[Fault] = []
    scalars = {name: value for name, value in table.items() if name not in ("device", "intra", "inter")}
    counts = _section("", scalars, ClusterKeys, faults, ("device", "intra", "inter"))
    entry, device = _device_of(table.get("device"), faults)
    intra, inter = (_link_of(name, table, counts, faults) for name in ("intra", "inter"))
    if faults or device is None or counts is None:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise SpecError(where, "\n  ".join([count, *map(str, faults)]), faults=faults)
    size = counts.devices_per_node
    usual = links_of(entry, size) if entry else default_links(device, size)
    reach = counts.scaleup_devices or (entry.scaleup_devices if entry and not intra else None)
    made = (counts.nodes, size, device, intra or usual[0], inter or usual[1])
    return Cluster(*made, scaleup_devices=reach, origin=where)


def _table_of(path: str) -> dict[str, Any]:
    import tomllib

    try:
        with open(path, "rb") as file:
            return tomllib.loads(file.read().decode("utf-8-sig"))
    except FileNotFoundError:
        raise SpecError(path, "there is no such file.", "A cluster is a TOML file, or such as 8xH100-SXM.") from None
    except OSError as error:
        raise SpecError(shown(path), f"cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(shown(path), f"is not TOML: {error}.") from None


def _device_of(part: Any, faults: list[Fault]) -> tuple[DeviceEntry | None, Device | None]:
    """The catalogue's entry that `device` names or is like, and the device itself."""
    if isinstance(part, str):
        entry = _entry_of("device", part, faults)
        return entry, entry.device if entry else None
    if not isinstance(part, Mapping):
        rule = "is required." if part is None else f"is {shown(part)}, must be a name or a table."
        faults.append(Fault("device", rule, 'Such as device = "H100-SXM", or [device] with memory_gib.'))
        return None, None
    keys = _section("device.", part, DeviceKeys, faults)
    entry = _entry_of("device.like", keys.like, faults) if keys and keys.like else None
    if keys is None or (keys.like and entry is None):
        return None, None
    if entry is None and keys.memory_gib is None:
        faults.append(Fault("device.memory_gib", "is required without device.like.", "In units of 2^30 bytes."))
        return None, None
    return entry, _made(keys, entry.device if entry else None)


def _made(keys: DeviceKeys, like: Device | None) -> Device:
    """The device of a table, over the figures of the one that it is like."""
    base = like or Device(0, {}, name="device", source=OWN)
    peaks = {name: getattr(keys, f"peak_{name}_tflops") for name in PEAKS}
    given = {name: tflops * 1e12 for name, tflops in peaks.items() if tflops is not None}
    memory, host = keys.memory_bandwidth_gb_per_s, keys.host_bandwidth_gb_per_s
    return replace(
        base,
        key="",
        name=keys.name or base.name,
        memory_bytes=base.memory_bytes if keys.memory_gib is None else round(keys.memory_gib * GIB),
        memory_source=base.memory_source if keys.memory_gib is None else OWN,
        peak_flops=dict(base.peak_flops) | given,
        achieved_flops={name: flops for name, flops in base.achieved_flops.items() if name not in given},
        memory_bytes_per_s=base.memory_bytes_per_s if memory is None else memory * 1e9,
        host_bytes_per_s=base.host_bytes_per_s if host is None else host * 1e9,
        source=f"{OWN}, else {base.source}" if like else OWN,
    )


def _entry_of(where: str, text: str, faults: list[Fault]) -> DeviceEntry | None:
    try:
        return find_device(text)
    except CatalogError as error:
        faults.append(Fault(where, f"{error.asked} {error.rule}", error.nearest))
        return None


def _link_of(name: str, table: Table, counts: ClusterKeys | None, faults: list[Fault]) -> Link | None:
    """The link that the file gives; None where it gives none, or a wrong one."""
    part = table.get(name)
    if part is None:
        return None
    if isinstance(part, str):
        try:
            return named_link(part, counts.devices_per_node if counts else 1)
        except CatalogError as error:
            faults.append(Fault(name, f"{error.asked} {error.rule}", error.nearest))
            return None
    if not isinstance(part, Mapping):
        near = f"Such as [{name}] with bandwidth_gb_per_s."
        faults.append(Fault(name, f"is {shown(part)}, must be the name of a link or a table.", near))
        return None
    keys = _section(f"{name}.", part, LinkKeys, faults)
    return _stated_link(name, keys) if keys else None


def _stated_link(name: str, keys: LinkKeys) -> Link:
    assumed_s, assumed = BUS_LATENCY if name == "intra" else ETHERNET_LATENCY
    achieved = keys.achieved_gb_per_s
    return Link(
        keys.bandwidth_gb_per_s * 1e9,
        assumed_s if keys.latency_us is None else keys.latency_us / 1e6,
        name=keys.name or name,
        achieved_bytes_per_s=None if achieved is None else achieved * 1e9,
        source=OWN + (f"; {assumed}" if keys.latency_us is None else ""),
    )


def _section(where: str, part: Table, section: type, faults: list[Fault], also: tuple[str, ...] = ()) -> Any:
    """The part as that dataclass; None where something is wrong, which is added to the faults."""
    declared = {field.name: field for field in fields(section)}
    found = [_unknown(where, str(name), [*declared, *also]) for name in part if name not in declared]
    found += [fault for field in declared.values() if (fault := _field_fault(where, part, field))]
    faults.extend(found)
    if found:
        return None
    return section(**{name: converted(value, _kind(declared[name])) for name, value in part.items()})


def _field_fault(where: str, part: Table, field: Field[Any]) -> Fault | None:
    if field.name not in part:
        return Fault(where + field.name, "is required.", about(field).meaning) if field.default is MISSING else None
    return value_fault(where + field.name, part[field.name], _kind(field), about(field))


def _unknown(where: str, name: str, keys: list[str]) -> Fault:
    rule = "is no key of a cluster." if not where else f"[{where.rstrip('.')}] has no such key."
    if name in MEANT and MEANT[name].split(",")[0].split()[0] in keys:
        return Fault(where + name, rule, f"Nearest: {where}{MEANT[name]}.")
    near = closest(name, keys)
    return Fault(where + name, rule, f"Nearest: {where}{near}." if near else f"Keys: {', '.join(keys)}.")


def _kind(field: Field[Any]) -> str:
    return str(field.type).removesuffix(" | None")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterKeys:
    """What stands at the top of the file, besides `device`, `intra` and `inter`."""

    nodes: int = key("Machines.", 1, least=1)
    devices_per_node: int = key("Devices in each.", 1, least=1)
    scaleup_devices: int | None = key("Devices that `intra` joins, if that is more than a node.", None, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKeys:
    """`[device]`: one accelerator."""

    like: str | None = key("A device of the catalogue, for what is left out.", None)
    name: str | None = key("In words.", None)
    memory_gib: float | None = key("Capacity in units of 2^30 bytes.", None, above=0.0, most=MOST)
    memory_bandwidth_gb_per_s: float | None = key("Of that memory, 10^9 bytes per second.", None, above=0.0, most=MOST)
    host_bandwidth_gb_per_s: float | None = key("To the host, one direction.", None, above=0.0, most=MOST)
    peak_bf16_tflops: float | None = key("Dense, 10^12 operations per second.", None, above=0.0, most=MOST)
    peak_fp16_tflops: float | None = key("Dense, 10^12 operations per second.", None, above=0.0, most=MOST)
    peak_tf32_tflops: float | None = key("Dense, 10^12 operations per second.", None, above=0.0, most=MOST)
    peak_fp8_tflops: float | None = key("Dense, 10^12 operations per second.", None, above=0.0, most=MOST)
    peak_fp4_tflops: float | None = key("Dense, 10^12 operations per second.", None, above=0.0, most=MOST)
    peak_fp32_tflops: float | None = key("Dense, 10^12 operations per second.", None, above=0.0, most=MOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKeys:
    """`[intra]` and `[inter]`: a link, per device and in one direction."""

    bandwidth_gb_per_s: float = key("10^9 bytes per second.", above=0.0, most=MOST)
    latency_us: float | None = key("Of one message.", None, least=0.0, most=MOST)
    achieved_gb_per_s: float | None = key("Bus bandwidth that an all-reduce reaches.", None, above=0.0, most=MOST)
    name: str | None = key("Such as NVLink4.", None)
