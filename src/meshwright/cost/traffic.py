"""What a rank sends in one optimizer step, by axis: bytes, not seconds, before any of it is hidden behind work.

A ring of g ranks sends (g - 1) / g of a tensor for an all-gather or a reduce-scatter, and twice that for an all-reduce.
N are the parameters of the fullest rank, Nt those that are trained, D the ranks of a shard group, R its replicas, m
microbatches, T tokens of one on this rank, c and r the bytes of a number gathered and reduced:

    data       stage 0     2 r Nt (G - 1) / G once, G = all data-parallel ranks (m times with sync = every)
               stages 1, 2 c N (D - 1) / D once; r Nt (D - 1) / D once, or m times with sync = every
               stage 3     as 2, but gathered in forward and backward of every microbatch: 2 m; what is in no block: m
               pp > 1      gradients once; stage 3 gathers m + 1 times, as a block stays from its backward pass to the
                           next forward pass, and what is in no block once
    replicas   HSDP        2 r Nt / D (R - 1) / R once
    tensor     with SP, 4 collectives of c T h a layer and pass; backward has as many, recompute 3 more, or 4 if its
               outputs are dropped out
    pipeline   c T h / tp a boundary and microbatch, and as much back; r V h / (tp D) of a table tied over both ends
    context    (cp - 1) exchanges of keys and values; twice as many bytes in backward
    expert     tokens to their experts and back, in both passes
    host       offloaded optimizer state: gradients down, weights up

Sources: Patarasuk and Yuan 2009 (ring); Rajbhandari et al., arXiv 1910.02054, section 7; Korthikanti et al., arXiv
2205.05198, section 4.2.2; Narayanan et al., arXiv 2104.04473, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.candidate import RECOMPUTE, V_SHAPED, Candidate, Column, Columns
from meshwright.cost.quantities import Job, StageQuantities
from meshwright.cost.stages import Stage
from meshwright.cost.terms import tied_ends
from meshwright.spec.estimate import Term

AXES: Final = ("data", "replicas", "tensor", "pipeline", "context", "expert", "host")
FULL: Final = RECOMPUTE.index("full")
RING: Final = "ring collectives, Patarasuk and Yuan 2009"
SOURCES: Final = {
    "data": f"{RING}; ZeRO, arXiv 1910.02054, section 7",
    "replicas": f"{RING}; hybrid sharding, arXiv 2304.11277, section 3.2.2",
    "tensor": f"{RING}; sequence parallelism, arXiv 2205.05198, section 4.2.2",
    "pipeline": "arXiv 2104.04473, section 3.2",
    "context": "ring attention, arXiv 2310.01889",
    "expert": "all-to-all, arXiv 2006.16668",
    "host": "ZeRO-Offload, arXiv 2101.06840, section 4",
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that the busiest rank sends in a step, a number for each candidate.

    Attributes:
        by_axis: in the order of AXES.
        total_bytes: of all axes.
    """

    by_axis: tuple[NDArray[np.float64], ...]
    total_bytes: NDArray[np.float64]


def traffic(job: Job, columns: Columns, stages: Sequence[Stage] | None = None) -> Traffic:
    """What candidates send in a step.

    Args:
        job: what is trained.
        columns: the candidates.
        stages: of a pipeline, that are looked at for the one that sends most; None for all that can be it.
    """
    rows = np.arange(len(columns))
    amounts = np.stack([_amounts(TrafficQuantities(job, columns, one)) for one in stages or _kinds(columns)])
    busiest = amounts.sum(axis=1).argmax(axis=0)
    parts = amounts[busiest, :, rows].T  # (axes, candidates)
    return Traffic(tuple(parts), parts.sum(axis=0))


def explain_traffic(job: Job, candidate: Candidate) -> tuple[Term, ...]:
    """What one candidate's busiest rank sends in a step: a term for each axis that sends anything."""
    each = [TrafficQuantities(job, candidate, one) for one in _kinds(candidate)]
    q = max(each, key=lambda one: float(_amounts(one).sum()))
    amounts = {name: float(q.axis(name)) for name in AXES}
    return tuple(
        Term(name, amount, "bytes", q.formula(name), SOURCES[name]) for name, amount in amounts.items() if amount
    )


def _kinds(columns: Columns) -> tuple[Stage, ...]:
    """The stages that can send most: the last has the head, the first maybe more layers, the middle two neighbours."""
    most = int(np.max(columns.pp))
    return ("last",) if most == 1 else ("last", "first") if most == 2 else ("last", "first", "middle")


def _amounts(q: TrafficQuantities) -> NDArray[np.float64]:
    """Bytes of every axis: (axes, candidates)."""
    return np.stack([np.broadcast_to(np.asarray(q.axis(name), np.float64), (len(q.columns),)) for name in AXES])


def ring(ranks: Column) -> Column:
    """(g - 1) / g: the share of a tensor that a rank sends for an all-gather or a reduce-scatter."""
    return (ranks - 1) / ranks


@final
class TrafficQuantities:
    """Counts of the ranks of one stage."""

    def __init__(self, job: Job, columns: Columns, stage: Stage) -> None:
        self.job, self.columns = job, columns
        self.stage = StageQuantities(job, columns, stage)
        is_ours = job.states.cuts == "fsdp2"
        self.gather_bytes = min(job.states.parameter_bytes, float(job.engine.compute_bytes))
        self.reduce_bytes = float(job.engine.reduce_bytes) if is_ours else job.states.gradient_bytes
        self.compute_bytes = float(job.engine.compute_bytes)

    def axis(self, name: str) -> Column:
        """Bytes sent for one axis."""
        return getattr(self, f"_{name}")()

    @property
    def gathers(self) -> Column:
        """How often a step gathers a block."""
        c, engine = self.columns, self.job.engine
        # A stage's block is freed after each forward pass: whatever the order, m + 1 times are it not there.
        staged = c.num_microbatches + 1 if engine.harvests else 1
        often = np.where((np.asarray(c.pp) > 1) & engine.pipeline_keeps_gathered, staged, 2 * c.num_microbatches)
        return np.where(np.asarray(c.zero_stage) == 3, often, 1)

    @property
    def root_gathers(self) -> Column:
        """How often a step gathers what is in no block: it stays until its backward pass, in a pipeline to the end."""
        staged = (np.asarray(self.columns.pp) > 1) & self.job.engine.harvests
        return np.where(staged, 1, np.maximum(self.gathers // 2, 1))

    @property
    def reductions(self) -> Column:
        """How often a step reduces a gradient."""
        c = self.columns
        each = (np.asarray(c.sync_every) == 1) & ~((np.asarray(c.pp) > 1) & self.job.engine.harvests)
        return np.where(each, c.num_microbatches, 1)

    def _data(self) -> Column:
        q, c = self.stage, self.columns
        copies = c.dp_replicate * c.dp_shard * c.cp
        dense = self._group(q.root + q.blocks, q.frozen, copies, q.shard_group, q.root)
        return dense + self._group(q.experts, 0.0, *self._expert_ranks(copies), 0.0)

    def _expert_ranks(self, copies: Column) -> tuple[Column, Column]:
        """Ranks that hold the same experts, and those over which ZeRO cuts them."""
        return np.maximum(copies / self.columns.ep, 1), np.maximum(self.stage.shard_group / self.columns.ep, 1)

    def _group(self, held: Column, frozen: Column, copies: Column, shards: Column, root: Column) -> Column:
        """Of some parameters: `copies` ranks hold them, whole or in `shards` parts; `root` of them are in no block."""
        trained = held - frozen
        whole = 2 * self.reduce_bytes * trained * ring(copies) * self.reductions
        gathered = self.gather_bytes * ((held - root) * self.gathers + root * self.root_gathers) * ring(shards)
        reduced = self.reduce_bytes * trained * ring(shards) * self.reductions
        return np.where(np.asarray(self.columns.zero_stage) == 0, whole, gathered + reduced)

    def _replicas(self) -> Column:
        q, c = self.stage, self.columns
        return 2 * self.reduce_bytes * q.cut(trained_only=True) * ring(c.dp_replicate) * (np.asarray(c.zero_stage) > 0)

    @property
    def _activation(self) -> Column:
        """Bytes of one microbatch's residual stream."""
        return self.compute_bytes * self.stage.tokens * self.job.model.d_model

    @property
    def passes(self) -> Column:
        """Forward passes of a layer in a step: recompute makes it two."""
        return 1 + (np.asarray(self.columns.recompute) == FULL)

    def _tensor(self) -> Column:
        c = self.columns
        return self._collectives * self._activation * ring(c.tp) * c.num_microbatches

    @property
    def _collectives(self) -> Column:
        """All-gathers and reduce-scatters of a microbatch: of its layers, and of embedding and head.

        Recompute ends with what backward needs: without dropout it leaves out the last reduce-scatter.
        """
        q, back = self.stage, 4 + 2 * self.job.engine.regathers_norms
        again = 3 + bool(self.job.model.architecture.get("dropout"))
        each = 4 + back + again * (np.asarray(self.columns.recompute) > 0)
        return q.content.layers * each + 2 * (q.has_first + q.has_last)

    @property
    def sends(self) -> Column:
        """Activations and gradients that the stage sends on for a microbatch; the ends of a V have two neighbours."""
        q, c = self.stage, self.columns
        is_v = np.asarray(c.schedule) == V_SHAPED
        at_end = np.where(is_v, c.chunks, 2 * c.chunks - 1)
        is_end = q.is_first | q.is_last | (np.asarray(c.pp) == 2)
        return np.where(np.asarray(c.pp) == 1, 0, np.where(is_end, at_end, 2 * c.chunks))

    def _pipeline(self) -> Column:
        return self.sends * self.columns.num_microbatches * self._activation / self.columns.tp + self._ends

    @property
    def _ends(self) -> Column:
        """The gradient of a table that is tied over the first and the last stage: an all-reduce of the two's parts."""
        q, of_ours = self.stage, self.job.engine.harvests
        held = tied_ends(q) * of_ours / q.shard_group
        return 2 * self.reduce_bytes * held * ring(2)

    def _context(self) -> Column:
        c = self.columns
        one_way = (c.cp - 1) * self.compute_bytes * self.stage.tokens * self.kv_width / c.tp
        return self.stage.content.layers * (self.passes + 2) * one_way * c.num_microbatches

    @property
    def kv_width(self) -> int:
        """Numbers that keys and values of a token have together."""
        model = self.job.model
        given = model.architecture.get("head_dim")
        head_dim = given if isinstance(given, int) else model.d_model // max(model.n_heads, 1)
        return 2 * model.n_kv_heads * head_dim

    @property
    def top_k(self) -> int:
        """Experts that a token passes."""
        given = self.job.model.architecture.get("top_k")
        return given if isinstance(given, int) else 1

    def _expert(self) -> Column:
        c = self.columns
        layers = self.stage.content.layers * self.expert_share
        exchanges = 2 * (self.passes + 1) * self.top_k * self._activation / c.tp
        return layers * exchanges * ring(c.ep) * c.num_microbatches

    @property
    def expert_share(self) -> float:
        """Of the layers, that have experts."""
        units = self.job.model.units
        return sum(unit.count for unit in units if unit.expert) / max(self.job.model.n_layers, 1)

    def _host(self) -> Column:
        states, q = self.job.states, self.stage
        both = states.gradient_bytes + states.parameter_bytes
        return both * q.cut(trained_only=True) * np.asarray(self.columns.offload)

    def formula(self, name: str) -> str:
        """How an axis of one candidate comes about, with its numbers in."""
        return str(getattr(self, f"_say_{name}")())

    def _say_data(self) -> str:
        q, c = self.stage, self.columns
        copies, experts = c.dp_replicate * c.dp_shard * c.cp, float(q.experts)
        text = self._say_group(float(q.root + q.blocks), float(q.frozen), copies, int(q.shard_group), float(q.root))
        holders, shards = (int(ranks) for ranks in self._expert_ranks(copies))
        return f"{text} + experts: {self._say_group(experts, 0.0, holders, shards, 0.0)}" if experts else text

    def _say_group(self, held: float, frozen: float, copies: int, shards: int, root: float) -> str:
        r, trained, again = _n(self.reduce_bytes), _n(held - frozen), int(self.reductions)
        if self.columns.zero_stage == 0:
            return f"all-reduce: 2 x {r} x {trained} x {_share(copies)} x {again}"
        often = int(self.gathers)
        blocks = f"({_n(held - root)} x {often} + {_n(root)} x {int(self.root_gathers)})" if often > 1 else _n(held)
        text = f"gather: {_n(self.gather_bytes)} x {blocks} x {_share(shards)}"
        return f"{text} + reduce: {r} x {trained} x {_share(shards)} x {again}"

    def _say_replicas(self) -> str:
        cut = _n(self.stage.cut(trained_only=True))
        return f"all-reduce: 2 x {_n(self.reduce_bytes)} x {cut} x {_share(self.columns.dp_replicate)}"

    def _say_tensor(self) -> str:
        c = self.columns
        each = f"{_n(self._activation)} x {_share(c.tp)}"
        return f"{int(self._collectives)} collectives x {each} x {c.num_microbatches} microbatches"

    def _say_pipeline(self) -> str:
        c = self.columns
        ends = f" + tied table: {_n(self._ends)}" if float(self._ends) else ""
        return f"{int(self.sends)} sends x {_n(self._activation)} / {c.tp} x {c.num_microbatches} microbatches{ends}"

    def _say_context(self) -> str:
        c = self.columns
        keys = f"{_n(self.compute_bytes)} x {_n(self.stage.tokens)} tokens x {self.kv_width} / {c.tp}"
        times = f"{int(self.stage.content.layers)} layers x {int(self.passes) + 2} x {c.cp - 1} steps"
        return f"{times} x {keys} x {c.num_microbatches} microbatches"

    def _say_expert(self) -> str:
        c = self.columns
        layers = _n(float(self.stage.content.layers) * self.expert_share)
        each = f"{2 * (int(self.passes) + 1)} x {self.top_k} experts x {_n(self._activation)} / {c.tp}"
        return f"{layers} layers x {each} x {_share(c.ep)} x {c.num_microbatches} microbatches"

    def _say_host(self) -> str:
        states = self.job.states
        both = f"({_n(states.gradient_bytes)} + {_n(states.parameter_bytes)})"
        return f"{both} x {_n(self.stage.cut(trained_only=True))}"


def _share(ranks: int) -> str:
    return f"{ranks - 1}/{ranks}"


def _n(value: Any) -> str:
    """A number as formulas have it."""
    value = float(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
