"""Which device or link of the catalogue a name means: a key, a short name, or what a driver says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from meshwright.errors import CatalogError
from meshwright.spec.hardware import DeviceEntry, LinkEntry, devices, links
from meshwright.spec.nearest import closest, listed, shown

ALIASES: Final[Mapping[str, str]] = {
    "A100-40GB": "A100-SXM-40GB",
    "A100-80GB": "A100-SXM-80GB",
    "A100-PCIE-80GB": "A100-PCIE",
    "A6000": "RTXA6000",
    "GB200-NVL72": "GB200",
    "GB300-NVL72": "GB300",
    "H100-80GB": "H100-SXM-80GB",
    "H100-NVL-94GB": "H100-NVL",
    "H100-PCIE-80GB": "H100-PCIE",
    "V100-16GB": "V100-SXM-16GB",
    "V100-32GB": "V100-SXM-32GB",
    "3090": "RTX3090",
    "4090": "RTX4090",
    "5090": "RTX5090",
}
"""Short names besides the keys without their last parts (`H100-SXM` for `H100-SXM-80GB`)."""


def find_device(text: str) -> DeviceEntry:
    """The device that a name means: its key, the key without its last parts, or another short name. Case is ignored.

    Raises:
        CatalogError: there is none, or the name leaves the board open; the nearest ones are named.
    """
    boards = [entry.key for entry in devices().values() if not entry.is_open]
    known = {_plain(key): key for key in boards} | {_plain(short): key for short, key in ALIASES.items()}
    if _plain(text) in known:
        return devices()[known[_plain(text)]]
    shortened = [key for key in boards if _plain(text) in _shorter(key)]
    if len(shortened) == 1:
        return devices()[shortened[0]]
    if shortened:
        rule = "leaves the board open, and with it memory and links."
        raise CatalogError(f"device {shown(text)}", rule, f"Nearest: {listed(shortened)}.")
    raise _unknown(text, boards)


def find_link(text: str) -> LinkEntry:
    """The link of that key. Case is ignored.

    Raises:
        CatalogError: there is none.
    """
    known = {_plain(key): entry for key, entry in links().items()}
    if _plain(text) in known:
        return known[_plain(text)]
    near = closest(text, links())
    hint = f"Nearest: {near}." if near else f"Links: {', '.join(links())}."
    raise CatalogError(f"link {shown(text)}", "is not in the catalogue.", hint)


def device_of_driver(name: str) -> DeviceEntry | None:
    """The catalogue's device for a name that the driver gives (`NVIDIA H100 80GB HBM3`); None if there is none."""
    bare = _plain(name.removeprefix("NVIDIA ").removeprefix("Tesla "))
    return next((entry for entry in devices().values() if bare in map(_plain, entry.driver_names)), None)


def _unknown(text: str, boards: Iterable[str]) -> CatalogError:
    asked = f"device {shown(text)}"
    if _plain(text) in map(_plain, links()):
        return CatalogError(asked, "is a link, not a device.", "`meshwright cluster list` names the devices.")
    near = closest(text, [*boards, *ALIASES])
    hint = f"Nearest: {ALIASES.get(near, near)}." if near else "Such as H100-SXM; `meshwright cluster list` names all."
    return CatalogError(asked, "is not in the catalogue.", hint)


def _plain(text: str) -> str:
    return "".join(letter for letter in text.casefold() if letter.isalnum())


def _shorter(key: str) -> list[str]:
    parts = key.split("-")
    return [_plain("-".join(parts[:size])) for size in range(1, len(parts))]
