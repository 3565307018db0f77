"""This machine as a cluster of one node: its GPUs as nvidia-smi names them, else its CPUs, a process each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Final

from meshwright.errors import SpecError
from meshwright.spec.cluster import Cluster, Device, Link
from meshwright.spec.device_links import default_links, links_of
from meshwright.spec.device_names import device_of_driver

MIB: Final = 2**20
LOCAL: Final = "local"
NVIDIA_SMI: Final = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
NVIDIA_SMI_LIMIT_S: Final = 10.0
"""Without its persistence mode the driver takes seconds to wake eight GPUs."""

GLOO: Final = Link(
    1.2e9,
    0.85e-3,
    name="gloo",
    source="measured: gloo point to point, 2 processes of one 2-core machine, PyTorch 2.13 (64 MB in 53 ms, 1 KB in"
    " 0.85 ms)",
)


def local_cluster(devices_per_node: int | None = None) -> Cluster:
    """This machine, without torch.

    Args:
        devices_per_node: how many of its GPUs, or how many CPU processes, which share its memory equally; None for
            every visible GPU, else one process for each CPU.

    Raises:
        SpecError: more GPUs than there are.
    """
    gpus = visible(read_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus:
        return _of_gpus(gpus, devices_per_node or len(gpus))
    return _of_cpus(devices_per_node or count_cpus())


def read_gpus(command: Sequence[str] = NVIDIA_SMI) -> list[Gpu]:
    """The GPUs that nvidia-smi lists; none where it is not there, fails or does not answer."""
    import subprocess

    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=NVIDIA_SMI_LIMIT_S
        )
    except (OSError, subprocess.SubprocessError):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [gpu for line in lines if (gpu := _gpu(line))]


def visible(gpus: Sequence[Gpu], chosen: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves; as in CUDA, what follows a word that means no device is gone too."""
    if chosen is None:
        return list(gpus)
    found = []
    for word in (part.strip() for part in chosen.split(",")):
        # nvidia-smi was not asked for the long names: one of them stands for any GPU of the machine.
        index = 0 if word.startswith(("GPU-", "MIG-")) else int(word) if word.isdecimal() else len(gpus)
        if index >= len(gpus):
            break
        found.append(gpus[index])
    return found


def count_cpus() -> int:
    """CPUs that this process may use: its affinity, and the quota of its control group rounded up."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_cpus_of(text) for text in control_group_values("cpu", ("cpu.max",))]
    periods = control_group_values("cpu", ("cpu.cfs_period_us",))
    old = zip(control_group_values("cpu", ("cpu.cfs_quota_us",)), periods, strict=False)
    quotas += [_cpus_of(f"{quota} {period}") for quota, period in old]
    return max(1, min([affinity, *(cpus for cpus in quotas if cpus)]))


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or the limit of its control group."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = control_group_values("memory", ("memory.max", "memory.limit_in_bytes"))
    return min([physical, *(int(text) for text in limits if text.isdecimal() and int(text) > 0)])


def control_group_values(
    controller: str, names: Sequence[str], root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup"
) -> list[str]:
    """What files of that name say for this process's control group and for those above it, versions 1 and 2.

    Args:
        controller: `memory` or `cpu`.
        names: files to look for.
        root: where control groups are mounted.
        own: the file that names this process's groups.
    """
    folders = dict.fromkeys(
        folder for line in _lines(own) for folder in _folders_of(line.split(":", 2), controller, root)
    )
    return [text.strip() for folder in folders for name in names for text in _lines(os.path.join(folder, name))[:1]]


def _folders_of(entry: Sequence[str], controller: str, root: str) -> Iterator[str]:
    """Folders of a line `number:controllers:path`, innermost first; version 2 names no controllers."""
    if len(entry) != 3 or (entry[1] and controller not in entry[1].split(",")):
        return
    mount = os.path.join(root, controller) if entry[1] else root
    path = PurePosixPath(entry[2])
    for folder in (path, *path.parents):
        yield os.path.normpath(mount + os.sep + str(folder))


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _cpus_of(text: str) -> int | None:
    """CPUs of a quota and a period in microseconds (`150000 100000`); None where there is no limit."""
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
        return None
    return -(-int(words[0]) // int(words[1]))


def _gpu(line: str) -> Gpu | None:
    name, comma, memory = line.rpartition(",")
    if not comma or not name.strip():
        return None
    # Where the GPU has no memory of its own (GB10) the driver says [N/A]: it takes the machine's.
    number = memory.strip()
    return Gpu(name.strip(), int(number) * MIB if number.isdecimal() and int(number) > 0 else memory_bytes())


def _of_gpus(gpus: Sequence[Gpu], devices_per_node: int) -> Cluster:
    if devices_per_node > len(gpus):
        rule = f"is {devices_per_node}; this machine shows {len(gpus)} GPUs."
        near = f"Nearest: {len(gpus)}, or name the device that other nodes have."
        raise SpecError("cluster.devices_per_node", rule, near)
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    kinds = len({gpu.name for gpu in gpus})
    note = f", the smallest of {kinds} kinds in this machine" if kinds > 1 else ""
    entry = device_of_driver(smallest.name)
    if entry is None or entry.device is None:
        device = _unknown_gpu(smallest, note)
        intra, inter = default_links(device, devices_per_node)
        return Cluster(1, devices_per_node, device, intra, inter, origin=LOCAL)
    known = entry.device
    memory = min(known.memory_bytes, smallest.memory_bytes)
    source = f"nvidia-smi{note}" if memory < known.memory_bytes else known.memory_source + note
    device = replace(known, memory_bytes=memory, memory_source=source)
    intra, inter = links_of(entry, devices_per_node)
    return Cluster(1, devices_per_node, device, intra, inter, scaleup_devices=entry.scaleup_devices, origin=LOCAL)


def _unknown_gpu(gpu: Gpu, note: str) -> Device:
    source = "not in the catalogue: peaks unknown"
    return Device(gpu.memory_bytes, {}, name=gpu.name, memory_source=f"nvidia-smi{note}", source=source)


def _of_cpus(processes: int) -> Cluster:
    total = memory_bytes()
    source = f"{total} bytes of this machine / {processes} processes"
    device = Device(total // processes, {}, name="CPU", kind="cpu", memory_source=source, source="this machine")
    inter = default_links(device, processes)[1]
    return Cluster(1, processes, device, GLOO, inter, origin=LOCAL)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver describes it.

    Attributes:
        name: such as `NVIDIA H100 80GB HBM3`.
        memory_bytes: total.
    """

    name: str
    memory_bytes: int
