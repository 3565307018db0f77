"""Material of the plan and report tests: models, jobs and clusters that need no catalogue."""

from __future__ import annotations

from meshwright.cost.engine import Engine
from meshwright.cost.quantities import Job
from meshwright.cost.states import STATES
from meshwright.spec.cluster import Cluster, Device, Link
from meshwright.spec.model_spec import Bytes, ModelSpec, UnitSpec


def dense(
    *,
    n_layers: int = 32,
    d_model: int = 4096,
    n_heads: int = 32,
    n_kv_heads: int = 8,
    d_ff: int = 14336,
    vocab_size: int = 128256,
    seq_len: int = 4096,
    max_seq_len: int | None = 131072,
    n_experts: int = 0,
) -> ModelSpec:
    """A Llama shape (or, with experts, a Mixtral one) in bf16: parameters exact, kept bytes of its large tensors."""
    head_dim, h = d_model // n_heads, d_model
    attention = 2 * h * h + 2 * h * n_kv_heads * head_dim
    expert = n_experts * 3 * h * d_ff
    router = n_experts * h
    block = attention + (expert or 3 * h * d_ff) + router + 2 * h
    kept = Bytes(residual=4.0 * h, normed=4.0 * h, inner=4.0 * h + 4.0 * n_kv_heads * head_dim + 8.0 * d_ff)
    unit = UnitSpec(
        name="layer",
        count=n_layers,
        parameters=block,
        expert=expert,
        replicated=2 * h + router,
        largest=h * d_ff,
        saved={
            "none": kept,
            "selective": Bytes(residual=2.0 * h, inner=kept.inner / 2),
            "full": Bytes(residual=2.0 * h),
        },
        backward_peak=Bytes(inner=4.0 * d_ff),
        matmul_parameters=block,
        attention_width=h,
    )
    return ModelSpec(
        name="dense",
        units=(unit,),
        embedding_parameters=vocab_size * h,
        head_parameters=vocab_size * h,
        other_parameters=h,
        loss_kept=Bytes(inner=4.0 * vocab_size),
        loss_peak=Bytes(inner=12.0 * vocab_size),
        d_model=h,
        vocab_size=vocab_size,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        n_experts=n_experts,
        max_seq_len=max_seq_len,
        seq_len=seq_len,
        compute="bf16",
        source="by hand",
        architecture={"head_dim": head_dim, "d_ff": d_ff, "top_k": 2 if n_experts else 0},
    )


LLAMA_405B = {"n_layers": 126, "d_model": 16384, "n_heads": 128, "d_ff": 53248}


def job_of(model: ModelSpec, *, global_batch_size: int = 1024, states: str = "fsdp2", gigabytes: float = 80.0) -> Job:
    """What is priced: bf16 compute on devices of so many GB."""
    engine = Engine(name="meshwright", compute_bytes=2)
    return Job(
        model=model,
        global_batch_size=global_batch_size,
        states=STATES[states],
        engine=engine,
        capacity_bytes=int(gigabytes * 1e9),
    )


def cluster_of(nodes: int = 1, devices_per_node: int = 8, gigabytes: float = 80.0) -> Cluster:
    """Equal nodes of one kind of device."""
    device = Device(int(gigabytes * 1e9), {"bf16": 989e12})
    return Cluster(nodes, devices_per_node, device, Link(450e9, 5e-6), Link(50e9, 10e-6))
