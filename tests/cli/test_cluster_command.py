"""`meshwright cluster`: the catalogue, and one cluster with its sources."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from meshwright.cli.cluster import cluster
from meshwright.errors import CatalogError
from meshwright.spec.find_cluster import find_cluster
from meshwright.spec.hardware import devices, links


def run(capsys, **options: object) -> str:
    assert cluster(Namespace(**{"action": None, "name": None, "json": False} | options)) == 0
    return capsys.readouterr().out


def test_the_list_names_every_board_and_link(capsys) -> None:
    text = run(capsys)
    assert text == run(capsys, action="list")
    words = {line.split()[0] for line in text.splitlines() if line.strip()}
    assert {entry.key for entry in devices().values() if not entry.is_open} | set(links()) <= words
    assert "A100-80GB" not in words  # a row for runs that do not say their board
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_list_as_json(capsys) -> None:
    table = json.loads(run(capsys, action="list", json=True))
    by_key = {row["key"]: row for row in table["devices"]}
    assert by_key["H100-SXM-80GB"]["peak_flops"]["bf16"] == 989e12
    assert by_key["H100-SXM-80GB"]["devices_per_node"] == 8 and by_key["H100-SXM-80GB"]["source"]
    assert {row["key"] for row in table["links"]} == set(links())


def test_show_prints_figures_and_sources(capsys) -> None:
    text = run(capsys, action="show", name="4x8xH100-SXM")
    lines = text.splitlines()
    assert lines[0] == "4x8xH100-SXM-80GB: 4 nodes of 8 devices"
    facts = "\n".join(lines[: lines.index("sources")])
    for fact in ("79.11 GiB", "3,350 GB/s", "989.0 TFLOP/s, 80 % measured", "450.00 GB/s", "50.00 GB/s", "catalogue"):
        assert fact in facts
    assert "vllm-project/vllm#27508" in text


def test_show_leaves_out_what_is_not_there(capsys) -> None:
    text = run(capsys, action="show", name="RTX4090")
    assert text.startswith("1xRTX4090: 1 node of 1 device\n")
    assert "in a node" not in text and "between nodes" not in text
    assert "joins" in run(capsys, action="show", name="4x4xGB200") and "joins" not in text


def test_show_of_this_machine(capsys) -> None:
    assert "local" in run(capsys, action="show", name="local")


@pytest.mark.parametrize("name", ["local", "2x8xMI300X"])
def test_show_as_json(capsys, name: str) -> None:
    table = json.loads(run(capsys, action="show", name=name, json=True))
    found = find_cluster(name)
    assert (table["name"], table["num_devices"]) == (found.name, found.num_devices)
    assert table["device"]["memory_bytes"] == found.device.memory_bytes
    assert table["intra"]["source"] and table["inter"]["source"]


def test_an_unknown_kind_is_the_users_mistake() -> None:
    with pytest.raises(CatalogError, match="Nearest: H100-SXM-80GB"):
        cluster(Namespace(action="show", name="8xH100-SMX", json=False))
