"""Every collective of one optimizer step, by axis and kind: how often, and what a rank sends by the ring formula."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.parallel.mesh import Mesh
from meshwright.spec.load import from_table
from meshwright.train.trainer import Trainer

Moved = Callable[[tuple[Any, ...], int], float]


def nbytes(value: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(value) if isinstance(x, torch.Tensor))


KINDS: Final[Mapping[str, tuple[str, Moved]]] = {
    # In c10d the first argument is what is written and the second what is read; a function reads its first.
    "allreduce_": ("all_reduce", lambda args, n: 2 * (n - 1) / n * nbytes(args[0])),
    "all_reduce": ("all_reduce", lambda args, n: 2 * (n - 1) / n * nbytes(args[0])),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args, n: (n - 1) / n * nbytes(args[1])),
    "reduce_scatter_tensor": ("reduce_scatter", lambda args, n: (n - 1) / n * nbytes(args[0])),
    "_allgather_base_": ("all_gather", lambda args, n: (n - 1) / n * nbytes(args[0])),
    "all_gather_into_tensor": ("all_gather", lambda args, n: (n - 1) * nbytes(args[0])),
    "send": ("send", lambda args, n: float(nbytes(args[0]))),
    "recv_": ("receive", lambda args, n: 0.0),
}
SILENT: Final = ("wait_tensor", "_wrap_tensor_autograd")

Found = dict[str, dict[str, tuple[int, float]]]
"""By axis and kind: calls and bytes sent."""


@final
class Collectives(TorchDispatchMode):
    """Counts collectives where they enter torch's dispatcher, so those of DDP's C++ and of FSDP2 too.

    Norms, flags and losses of a step are sums of fp64 numbers whatever the recipe computes in; a training in fp32 has
    no other collective of that type, and by it they are told apart.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._axes = axes_of(mesh)
        self.found: dict[str, dict[str, tuple[int, float]]] = defaultdict(dict)
        self.few: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor makes plain tensors' operations of it, which come here again
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            self._note(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        if name in SILENT:
            return
        kind, moved = KINDS[name]
        tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        if tensors[0].dtype == torch.float64:
            self.few.append(sum(x.numel() for x in tensors))
            return
        group = _group_of(args)
        if group.size() == 1:
            return  # FSDP2 asks the replicas of a shard, where there is but one
        axis = self._axes[group.group_name, kind if kind == "all_reduce" else ""]
        calls, sent = self.found[axis].get(kind, (0, 0.0))
        self.found[axis][kind] = calls + 1, sent + moved(args, group.size())


def _group_of(args: tuple[Any, ...]) -> Any:
    boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
    for one in boxed:
        try:
            return dist.ProcessGroup.unbox(one)
        except RuntimeError:
            continue  # a ReduceOp
    return _resolve_process_group(next(arg for arg in reversed(args) if isinstance(arg, str)))


def axes_of(mesh: Mesh) -> dict[tuple[str, str], str]:
    """The axis of each group by its name and by whether it is an all-reduce: two axes may have one group.

    A pipeline of two ranks and its ends do, if there are no others; the table's sum is all that is reduced over it.
    """
    groups, layout = mesh.groups, mesh.layout
    named = {
        "pipeline": [groups.pp], "ends": [groups.ends], "tensor": [groups.tp, *groups.copies.values()],
        "data": [groups.shards if layout.dp_shard > 1 else groups.dp], "replicas": [groups.replicas],
    }  # fmt: skip
    found: dict[tuple[str, str], str] = {}
    for axis, ones in named.items():
        for group in (one for one in ones if one is not None and one.size() > 1):
            if axis != "pipeline":
                found[group.group_name, "all_reduce"] = axis
            if axis != "ends":
                found[group.group_name, ""] = axis
    return found


def collectives_of(world: Any, table: Mapping[str, Any]) -> tuple[int, Found, list[int]]:
    """Of the third step on this rank: its place in the pipeline, what was counted, elements of what was left out.

    In the second, DDP makes its buckets anew and agrees on them.
    """
    trainer = Trainer(from_table(table), world)
    stream = trainer.stream(0, 3)
    for _ in range(2):
        trainer.stepper.step(stream)
    with Collectives(trainer.mesh) as counted:
        trainer.stepper.step(stream)
    return trainer.mesh.pp_rank, {axis: dict(kinds) for axis, kinds in counted.found.items()}, counted.few
