"""A cluster from a word, from a file, from this machine and from a recipe's `[cluster]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import CatalogError, SpecError
from meshwright.spec import local_cluster as local
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_file import DeviceKeys, cluster_from_table
from meshwright.spec.find_cluster import cluster_of_section, find_cluster, section_of_cluster
from meshwright.spec.hardware import GIB
from meshwright.spec.local_cluster import Gpu, control_group_values, local_cluster, read_gpus, visible
from meshwright.spec.sections import ClusterSection

H100, A100 = Gpu("NVIDIA H100 80GB HBM3", 81559 * 2**20), Gpu("NVIDIA A100-SXM4-40GB", 40960 * 2**20)
ODD = Gpu("NVIDIA RTX 6000 Ada Generation", 49140 * 2**20)
FILE = """
nodes = 2
devices_per_node = 4
[device]
like = "A100-80GB"
name = "A100 64GB"
memory_gib = 63.4
peak_bf16_tflops = 300
[intra]
bandwidth_gb_per_s = 200
latency_us = 5
"""


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "key"),
    [
        ("8xH100-SXM", 1, 8, "H100-SXM-80GB"),
        ("4x8xA100-80GB", 4, 8, "A100-SXM-80GB"),
        ("2048x8xH100-SXM", 2048, 8, "H100-SXM-80GB"),
        ("H100-SXM", 1, 1, "H100-SXM-80GB"),
        (" 2 x 4 X h100-sxm ", 2, 4, "H100-SXM-80GB"),
        ("2*8*mi300x", 2, 8, "MI300X"),
        ("2x8x4090", 2, 8, "RTX4090"),
        ("4090", 1, 1, "RTX4090"),
        ("18x4xGB200", 18, 4, "GB200"),
        ("16xT4", 1, 16, "T4"),
    ],
)
def test_words(text: str, nodes: int, per_node: int, key: str) -> None:
    found = find_cluster(text)
    assert (found.nodes, found.devices_per_node, found.device.key) == (nodes, per_node, key)
    assert found.origin == "catalogue"
    assert find_cluster(found.name) == found


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("16xH100-SXM", ["a node of H100-SXM-80GB has 8 devices, not 16.", "Nearest: 2x8xH100-SXM-80GB."]),
        ("2x16xH100-SXM", ["not 16", "Nearest: 4x8xH100-SXM-80GB."]),
        ("12xH100-SXM", ["not 12", "Nearest: 8xH100-SXM-80GB or 2x8xH100-SXM-80GB."]),
        ("8xGB200", ["has 4 devices, not 8", "Nearest: 2x4xGB200."]),
        ("17xT4", ["the largest usual server of T4 has 16 devices", "Nearest: 16xT4 or 2x16xT4."]),
        ("0xH100-SXM", ["cluster.devices_per_node: is 0", "Nearest: 1."]),
        ("0x8xH100-SXM", ["cluster.nodes: is 0"]),
        ("8xH100", ['cluster "8xH100"', "leaves the board open", "H100-SXM-80GB"]),
        ("8xH100-SMX", ["is not in the catalogue", "Nearest: H100-SXM-80GB."]),
        ("8x", ["is not in the catalogue"]),
        ("", ["names no device", "4x8xA100-80GB"]),
        ("locall", ["is not in the catalogue"]),
        ("no/such/place.toml", ["there is no such file"]),
    ],
)
def test_words_that_mean_no_cluster(text: str, fragments: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        find_cluster(text)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


WORD = st.lists(
    st.sampled_from(["8", "2", "0", "x", "*", "-", " ", "H100", "SXM", "A100", "80GB", "4090", "NVL", "GB200", "\n"])
    | st.text(max_size=3),
    max_size=8,
).map("".join)


@given(WORD)
def test_any_text_is_a_cluster_or_one_refusal(text: str) -> None:
    try:
        found = find_cluster(text)
    except SpecError as error:
        assert error.rule and "\n" not in error.rule
    else:
        assert isinstance(found, Cluster) and found.device.memory_bytes > 0


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    found = find_cluster(str(path))
    assert (found.nodes, found.devices_per_node, found.origin) == (2, 4, str(path))
    device = found.device
    assert (device.name, device.key, device.memory_bytes) == ("A100 64GB", "", round(63.4 * GIB))
    assert device.peak_flops == {"bf16": 300e12, "fp16": 312e12, "tf32": 156e12}
    assert device.achieved_flops == {}  # was measured on a board with another peak
    assert device.memory_bytes_per_s == 2039e9
    assert (found.intra.bandwidth_bytes_per_s, found.intra.latency_s) == (200e9, 5e-6)
    assert found.inter.bandwidth_bytes_per_s == 25e9  # the catalogue's
    assert found.device.memory_source == "as the file says"


def test_a_file_may_name_device_and_links() -> None:
    table = {"nodes": 2, "devices_per_node": 8, "device": "H100-SXM", "inter": "EFA-v2-p5"}
    made = cluster_from_table(table)
    usual = find_cluster("2x8xH100-SXM")
    assert (made.device, made.intra) == (usual.device, usual.intra)
    assert made.inter.name == "EFA-v2-p5" and made.inter.bandwidth_bytes_per_s == 50e9
    assert cluster_from_table({"devices_per_node": 16, "device": "H100-SXM"}).num_devices == 16  # the file knows better
    assert cluster_from_table({"device": "GB200", "devices_per_node": 4, "nodes": 2}).fast_devices == 8
    assert cluster_from_table({"device": {"memory_gib": 24}}).intra.name == "PCIe4x16"


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("", ["device: is required."]),
        ("device = 3", ["device: is 3, must be a name or a table."]),
        ("[device]\nname = 'x'", ["device.memory_gib: is required without device.like"]),
        ("[device]\nmemory_gb = 80", ["device.memory_gb: [device] has no such key.", "device.memory_gib, in units"]),
        ("device = 'H100'", ["leaves the board open"]),
        ("device = 'H100-SXM'\ndevises_per_node = 8", ["devises_per_node: is no key", "Nearest: devices_per_node."]),
        ("device = 'H100-SXM'\ngpus_per_node = 8", ["Nearest: devices_per_node."]),
        ("device = 'H100-SXM'\nlinks = 1", ["Nearest: intra and inter."]),
        ("device = 'H100-SXM'\nnodes = 0", ["nodes: is 0"]),
        ("device = 'H100-SXM'\nnodes = '2'", ['nodes: is "2", a string']),
        ("device = 'H100-SXM'\ninter = 'NVLink6'", ['inter: link "NVLink6" is not in the catalogue.']),
        ("device = 'H100-SXM'\ninter = 7", ["inter: is 7, must be the name of a link or a table."]),
        ("device = 'H100-SXM'\n[inter]\nlatency_us = 7", ["inter.bandwidth_gb_per_s: is required."]),
        ("[device]\nlike = 'H10'\nmemory_gib = 1", ["device.like:", "Nearest:"]),
        ("[device]\nmemory_gib = nan", ["device.memory_gib: is nan"]),
        ("[device]\nmemory_gib = 1e308", ["device.memory_gib"]),
        ("device = ", ["is not TOML"]),
        ("nodes = 0\nx = 1", ["3 faults", "nodes: is 0", "x: is no key", "device: is required"]),
        ("device = 'H100-SXM'\ndevices_per_node = 8\nscaleup_devices = 2", ["a node alone has 8"]),
    ],
)
def test_a_file_that_describes_no_cluster(tmp_path: Path, text: str, fragments: list[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        find_cluster(str(path))
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    for name, rule in (("folder.toml", "cannot be read"), ("bytes.toml", "is not TOML"), ("\0.toml", "is not TOML")):
        with pytest.raises(SpecError, match=rule):
            find_cluster(str(tmp_path / name))


VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["H100-SXM", "ETH-100", "A100", ""]),
    lambda inner: st.dictionaries(st.sampled_from(["like", "name", *DeviceKeys.__slots__, "latency_us", "x"]), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["nodes", "devices_per_node", "device", "intra", "inter", "y"]), VALUE))
def test_any_table_is_a_cluster_or_one_refusal(table: dict[str, object]) -> None:
    try:
        assert cluster_from_table(table).num_devices >= 1
    except SpecError as error:
        assert error.faults


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """`machine(gpus, cpus, memory)`: what this machine has."""

    def pretend(gpus: list[Gpu], cpus: int = 4, memory: int = 64 * GIB, chosen: str | None = None) -> None:
        monkeypatch.setattr(local, "read_gpus", lambda: gpus)
        monkeypatch.setattr(local, "count_cpus", lambda: cpus)
        monkeypatch.setattr(local, "memory_bytes", lambda: memory)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if chosen is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)

    return pretend


def test_this_machine_is_never_a_fault() -> None:
    found = find_cluster(" Local ")
    assert found.origin == "local" and found.nodes == 1
    if found.device.kind == "cpu":
        assert found.devices_per_node <= (os.cpu_count() or 1)
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert 0 < found.device.memory_bytes * found.devices_per_node <= total


def test_cpu_processes_share_the_memory(machine) -> None:
    machine([], cpus=4, memory=64 * GIB)
    found = local_cluster()
    assert (found.name, found.device.kind, found.device.memory_bytes) == ("4xCPU", "cpu", 16 * GIB)
    assert local_cluster(8).device.memory_bytes == 8 * GIB
    assert "measured" in found.intra.source


def test_gpus_are_matched_to_the_catalogue(machine) -> None:
    machine([H100] * 8)
    found, usual = local_cluster(), find_cluster("8xH100-SXM")
    # The driver's total is more than a process sees, so the catalogue's reading stays.
    assert (found.device, found.intra, found.inter) == (usual.device, usual.intra, usual.inter)
    machine([Gpu(H100.name, 40 * GIB)])
    assert (local_cluster().device.memory_bytes, local_cluster().device.memory_source) == (40 * GIB, "nvidia-smi")


def test_a_gpu_that_no_catalogue_has(machine) -> None:
    machine([ODD, ODD])
    found = local_cluster()
    assert (found.device.name, found.device.memory_bytes) == (ODD.name, ODD.memory_bytes)
    assert found.device.peak_flops == {} and found.intra.name == "PCIe4x16"


def test_unequal_gpus_count_as_the_smallest(machine) -> None:
    machine([H100, A100])
    found = local_cluster()
    assert found.device.key == "A100-SXM-40GB" and "the smallest of 2 kinds" in found.device.memory_source


def test_only_visible_gpus_count(machine) -> None:
    machine([H100, H100, A100], chosen="0,1")
    assert local_cluster().name == "2xH100-SXM-80GB"
    machine([H100], chosen="")
    assert local_cluster().device.kind == "cpu"


@pytest.mark.parametrize(
    ("chosen", "count"), [(None, 3), ("", 0), ("-1", 0), ("2", 1), ("0, 1", 2), ("0,7,1", 1), ("GPU-1f,GPU-2f", 2)]
)
def test_the_words_of_cuda_visible_devices(chosen: str | None, count: int) -> None:
    assert len(visible([H100] * 3, chosen)) == count


def test_more_gpus_than_there_are(machine) -> None:
    machine([H100] * 2)
    assert local_cluster(1).num_devices == 1
    with pytest.raises(SpecError, match=r"is 4; this machine shows 2 GPUs\. Nearest: 2"):
        local_cluster(4)


def says(text: str) -> list[str]:
    return [sys.executable, "-c", f"print({text!r})"]


def test_nvidia_smi_is_read_line_by_line(machine) -> None:
    machine([])
    assert read_gpus(says("NVIDIA H100 80GB HBM3, 81559\nA, with comma, 1024")) == [H100, Gpu("A, with comma", GIB)]
    assert read_gpus(says("NVIDIA GB10, [N/A]")) == [Gpu("NVIDIA GB10", 64 * GIB)]  # it uses the machine's memory
    assert read_gpus(says("No devices were found")) == []


def test_nvidia_smi_that_fails_or_hangs_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_gpus(["no-such-program"]) == []
    assert read_gpus([sys.executable, "-c", "print('X, 1'); raise SystemExit(9)"]) == []
    monkeypatch.setattr(local, "NVIDIA_SMI_LIMIT_S", 0.05)
    assert read_gpus([sys.executable, "-c", "import time; print('X, 1', flush=True); time.sleep(60)"]) == []


def test_the_limits_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "memory.max": "max\n",  # version 2, the root
        "job/memory.max": "8589934592\n",
        "job/step/memory.max": "max\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",  # version 1, no limit
        "memory/old/memory.limit_in_bytes": "4294967296\n",
        "job/cpu.max": "150000 100000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:memory:/old\n3:cpu,cpuacct:/\n0::/job/step\nbroken\n")
    names = ("memory.max", "memory.limit_in_bytes")
    found = control_group_values("memory", names, str(tmp_path), str(own))
    assert sorted(found) == ["4294967296", "8589934592", "9223372036854771712", "max", "max"]
    assert control_group_values("cpu", ("cpu.max",), str(tmp_path), str(own)) == ["150000 100000"]
    assert control_group_values("memory", names, str(tmp_path), str(tmp_path / "none")) == []

    monkeypatch.setattr(local, "control_group_values", lambda controller, names: found)
    assert local.memory_bytes() == min(4294967296, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@pytest.mark.parametrize(
    ("new", "quota", "period", "cpus"),
    [
        (["150000 100000"], [], [], 2),
        (["max 100000"], [], [], 16),
        ([], ["100000"], ["100000"], 1),
        ([], ["-1"], ["100000"], 16),
    ],
)
def test_a_quota_of_cpus_counts_rounded_up(monkeypatch, new, quota, period, cpus) -> None:
    values = {"cpu.max": new, "cpu.cfs_quota_us": quota, "cpu.cfs_period_us": period}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(local, "control_group_values", lambda controller, names: values[names[0]])
    assert local.count_cpus() == cpus


def test_a_section_of_a_recipe(machine, tmp_path: Path) -> None:
    machine([], cpus=4)
    assert cluster_of_section(ClusterSection()).name == "4xCPU"
    assert cluster_of_section(ClusterSection(nodes=2, devices_per_node=2)).name == "2x2xCPU"
    assert cluster_of_section(ClusterSection(nodes=2, device="H100-SXM")).name == "2x8xH100-SXM-80GB"
    assert cluster_of_section(ClusterSection(device="RTX4090")).name == "1xRTX4090"
    with pytest.raises(SpecError, match="Nearest: 2x8xH100-SXM-80GB"):
        cluster_of_section(ClusterSection(devices_per_node=16, device="H100-SXM"))
    with pytest.raises(CatalogError, match="leaves the board open"):
        cluster_of_section(ClusterSection(device="A100"))
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    assert cluster_of_section(ClusterSection(nodes=3, device=str(path))).name == "3x4xA100 64GB"


def test_a_section_brings_its_cluster_back(machine, tmp_path: Path) -> None:
    machine([H100] * 4)
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    for text in ("local", "2x4xH100-SXM", "18x4xGB200", "H100-SXM", "T4", str(path)):
        found = find_cluster(text)
        assert cluster_of_section(section_of_cluster(found)) == found
    assert section_of_cluster(find_cluster("local")) == ClusterSection()
