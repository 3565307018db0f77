"""The world that a rank has joined, as one frozen value."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, and missing from the stubs

from meshwright.errors import SpecError
from meshwright.train.environ import ROOM, Place, read_place, read_timeout_s
from meshwright.train.herald import Herald
from meshwright.train.native import quiet_torch
from meshwright.train.pulse import LEFT, Pulse, open_board


@dataclass(frozen=True, slots=True)
class World:
    """Where this process stands among the ranks.

    Attributes:
        rank: 0 .. world_size - 1 over all nodes; rank 0 speaks.
        world_size: how many ranks there are.
        local_rank: which rank of this node.
        local_world_size: how many ranks this node has.
        node_rank: which node.
        device: what this rank computes on.
        launcher: `meshwright`, `torchrun`, `environment` or `none`.
        timeout_s: how long a collective may wait for the others.
        pulse: where the training loop says how far it is.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: torch.device
    launcher: str
    timeout_s: float
    pulse: Pulse

    @property
    def speaks(self) -> bool:
        """Whether this is the rank that prints and publishes."""
        return self.rank == 0

    @property
    def n_nodes(self) -> int:
        """How many nodes there are, if all hold equally many ranks."""
        return self.world_size // self.local_world_size


@contextmanager
def join_world(timeout_s: float | None = None, *, device: str | None = None) -> Iterator[World]:
    """Join the process group that the environment describes, and leave it at the end.

    Without a launcher's environment this is a world of one: the same code runs, and no port is opened.

    Args:
        timeout_s: how long a collective may wait for the others; what `launch` was told if None, else 50.
        device: `cpu` or `cuda`; whichever the machine has if None.

    Raises:
        SpecError: the environment contradicts itself, or asks for more devices than the node has.
    """
    if dist.is_initialized():
        raise SpecError(
            "joining the world",
            "this process is in a process group already.",
            "Close the run before (run.close()), or start another process.",
        )
    place = read_place() or Place()
    timeout_s = read_timeout_s() if timeout_s is None else timeout_s
    chosen = _choose_device(place, device)
    herald = _send_herald(place)
    world = World(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        node_rank=place.node_rank,
        device=chosen,
        launcher=place.launcher,
        timeout_s=timeout_s,
        pulse=herald.pulse if herald is not None else _own_pulse(place),
    )
    try:
        _init_process_group(world)
        yield world
    except BaseException as error:
        # Among others this rank must not leave politely: they may wait in a collective, and taking leave would mean
        # waiting for them. It is about to end, and its open connections, by which they learn of it, end with it.
        if herald is not None:
            herald.end(error)
        if world.world_size == 1 and dist.is_initialized():
            dist.destroy_process_group()
        raise
    world.pulse.beat(world.pulse.read().step, LEFT)
    if herald is not None:
        herald.leave_quietly()
    dist.destroy_process_group()


def loopback_interface() -> str | None:
    """The name of the loopback interface (`lo`, `lo0`), or None if it has another name."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), None)


def _send_herald(place: Place) -> Herald | None:
    """Ranks without a supervisor of ours must find out among themselves who failed."""
    if place.launcher == "meshwright" or place.world_size == 1:
        return None
    quiet_torch()
    return Herald(place)


def _own_pulse(place: Place) -> Pulse:
    room = os.environ.get(ROOM) if place.launcher == "meshwright" else None
    return Pulse(open_board(Path(room, "pulse")), place.rank) if room else Pulse()


def _choose_device(place: Place, asked: str | None) -> torch.device:
    kind = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind != "cuda":
        return torch.device(kind)
    n_devices = torch.cuda.device_count()
    if place.local_rank >= n_devices:
        raise SpecError(
            f"{place.local_world_size} ranks on this node (LOCAL_WORLD_SIZE={place.local_world_size})",
            f"each rank needs a GPU of its own and the node shows {n_devices}",
            f"Start {n_devices} ranks per node, or train on the CPU with CUDA_VISIBLE_DEVICES= (empty).",
        )
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def _init_process_group(world: World) -> None:
    timeout = timedelta(seconds=world.timeout_s)
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    device_id = world.device if world.device.type == "cuda" else None
    if world.world_size == 1:
        store = HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id)
        return
    if world.local_world_size == world.world_size:
        # All ranks are on this host. Gloo would look its name up, and a name that resolves to an address
        # of another interface, or slowly, is a classic way to hang at the start.
        loopback = loopback_interface()
        if loopback is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
