"""What candidates are legal or not in, and the nearest legal values of each axis there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.cost.candidate import Candidate
from meshwright.cost.quantities import Job
from meshwright.spec.cluster import Cluster
from meshwright.spec.nearest import around, divisors, listed, multiples_around


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What candidates are legal or not in.

    Attributes:
        job: the model and the batch.
        cluster: what it is to run on.
        cuttable: the optimizer can update a parameter of which each rank has some rows.
        elementwise: it updates each weight from the weight's own gradient and state.
    """

    job: Job
    cluster: Cluster
    cuttable: bool = True
    elementwise: bool = True

    @property
    def num_devices(self) -> int:
        """Devices of the whole cluster."""
        return self.cluster.num_devices

    @property
    def node(self) -> int:
        """Devices that the fast link joins: those of a node, or of a rack that is wired as one."""
        return self.cluster.fast_devices


def legal_tp(setting: Setting) -> list[int]:
    """Every tp degree that the model and a node allow."""
    model, seq_len = setting.job.model, setting.job.seq_len
    kv = max(model.n_kv_heads, 1)
    degrees = [tp for tp in divisors(setting.node) if model.n_heads % tp == 0 and seq_len % tp == 0]
    return [tp for tp in degrees if kv % tp == 0 or tp % kv == 0] if setting.elementwise else [1]


def tp_near(setting: Setting, one: Candidate) -> str:
    """Tp degrees around the one asked, and all legal ones."""
    if not setting.job.model.n_heads:
        return "Nearest: tp 1."
    legal = legal_tp(setting)
    others = f"; legal on this node: {listed(legal)}" if len(legal) > 1 else ""
    return f"Nearest: tp {listed(around(one.tp, legal))}{others}."


def node_near(setting: Setting, one: Candidate) -> str:
    """Tp degrees that stay inside a node."""
    return f"Nearest: tp {listed(around(one.tp, legal_tp(setting)))}."


def layers_near(setting: Setting, one: Candidate) -> str:
    """As many stages as there are layers for, or fewer chunks."""
    layers = setting.job.model.n_layers
    if not layers:
        return "Nearest: pp 1: the model has no repeated blocks that stages could be made of."
    most = layers // one.chunks
    fitting = [pp for pp in divisors(setting.num_devices) if pp <= most]
    chunks = layers // one.pp
    fewer = f", or {chunks} chunk{'s' if chunks > 1 else ''} a stage" if one.chunks > 1 and chunks else ""
    return f"Nearest: pp {fitting[-1] if fitting else 1}{fewer}."


def experts_near(setting: Setting, one: Candidate) -> str:
    """Ep degrees that divide the experts."""
    experts = setting.job.model.n_experts
    return f"Nearest: ep {listed(around(one.ep, divisors(experts)))}." if experts else "Nearest: ep 1."


def expert_ranks_near(setting: Setting, one: Candidate) -> str:
    """Ep degrees that divide the ranks of a shard group."""
    return f"Nearest: ep {listed(around(one.ep, divisors(one.dp_shard * one.cp)))}."


def sequence_near(setting: Setting, one: Candidate) -> str:
    """Cp degrees for this sequence, and sequences for this cp."""
    half, odd = divmod(setting.job.seq_len, 2)
    legal = [1] if odd else divisors(half)
    whole = listed(multiples_around(setting.job.seq_len, 2 * one.cp))
    return f"Nearest: cp {listed(around(one.cp, legal))}; data.seq_len {whole}."


def hsdp_near(setting: Setting, one: Candidate) -> str:
    """Shard groups that fill nodes."""
    ranks, others, node = one.dp_replicate * one.dp_shard, one.cp * one.tp, setting.node
    good = [s for s in divisors(ranks) if s > 1 and ((s * others) % node == 0 or node % (s * others) == 0)]
    return f"Nearest: dp_shard {listed(around(one.dp_shard, good)) or ranks}, or zero3x{ranks}."


def rounds_near(setting: Setting, one: Candidate) -> str:
    """Microbatches, stages or schedules with whole rounds."""
    share = setting.job.global_batch_size // (one.dp_replicate * one.dp_shard)
    good = [size for size in divisors(share) if share // size % one.pp == 0]
    sizes = f"microbatch_size {listed(around(one.microbatch_size, good) or good[:1])}; " if good else ""
    degrees = listed(around(one.pp, divisors(one.num_microbatches)))
    return f"Nearest: {sizes}pp {degrees}; or 1f1b, which takes any number from {one.pp} up."


def stages_near(setting: Setting, one: Candidate) -> str:
    """What gives every stage a microbatch."""
    share = setting.job.global_batch_size // (one.dp_replicate * one.dp_shard)
    good = [size for size in divisors(share) if share // size >= one.pp]
    sizes = f"microbatch_size {good[-1]}; " if good else ""
    size = one.pp * one.microbatch_size * one.dp_replicate * one.dp_shard
    return f"Nearest: {sizes}global_batch_size {size}; pp {one.num_microbatches}; or gpipe, which takes any number."


def world_near(setting: Setting, one: Candidate) -> str:
    """The same with fewer data-parallel ranks, if that is enough."""
    ranks = one.dp_replicate * one.dp_shard
    room = setting.num_devices // (one.world_size // ranks)
    fewer = next((n for n in reversed(divisors(ranks)) if n <= room), None)
    if fewer is None:
        return f"Nearest: tp x pp x cp of at most {setting.num_devices}, or {one.world_size} devices."
    stage = one.zero_stage if fewer > 1 else 0
    split = (1, fewer) if stage else (fewer, 1)
    near = replace(one, dp_replicate=split[0], dp_shard=split[1], zero_stage=stage)
    return f"Nearest: {near.word}, or {one.world_size} devices."
