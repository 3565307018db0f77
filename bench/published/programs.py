"""Row -> Setting: which program a row ran, and how meshwright's formulas describe it.

A convention holds for a program, never for a row. Conventions come from the programs' sources and papers, and were
chosen with these rows in view; what was fitted as a number is in fits.py. What the prediction needs and a row's source
leaves out makes the row unscored, with the reason (unscored.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from meshwright.cost.candidate import RECOMPUTE, SCHEDULES, Candidate
from meshwright.cost.closed_form import KERNELS, Kernels, model_spec
from meshwright.cost.engine import Engine
from meshwright.cost.quantities import Job
from meshwright.cost.states import STATES, StateRecipe
from meshwright.spec.decoder import DecoderSpec
from meshwright.spec.hardware import devices
from meshwright.spec.model_spec import Bytes, ModelSpec
from published.decoders import decoder_of
from published.fits import FITTED, MEGATRON_WORKSPACE_BYTES, TORCHTITAN_UPPER
from published.rows import GIB, Row

Figure = Literal["allocated", "reserved", "device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A row in the words of the cost room.

    Attributes:
        row: the published figure.
        job: model, byte recipe, program, capacity.
        candidate: how it was cut.
        stages: of a pipeline, that the figure is of; None for the fullest.
        figure: allocated | reserved by the allocator | used on the device, by the driver.
        transient: gradients count only where they live, as in a tool's count of what is allocated.
    """

    row: Row
    job: Job
    candidate: Candidate
    stages: tuple[str, ...] | None = None
    figure: Figure
    transient: bool = False


def setting_of(row: Row) -> Setting:
    """Describe a row by its program's conventions."""
    return PROGRAMS[row.source_key](row)


def capacity_bytes(row: Row) -> int:
    """Memory of the row's device; 0 where the board is not named."""
    device = devices()[row.device].device
    return device.memory_bytes if device else 0


def candidate_of(row: Row, *, chunks: int | None = None, ep: int | None = None) -> Candidate:
    """How a row was cut.

    Args:
        row: the published run.
        chunks: of a pipeline stage, where the source leaves the program's default.
        ep: where a program counts expert parallelism in another way.
    """
    dp, is_cut = row.dp or 1, any(word in row.sharding for word in ("zero1", "distributed optimizer", "fsdp"))
    return Candidate(
        dp_replicate=1 if is_cut else dp,
        dp_shard=dp if is_cut else 1,
        zero_stage=3 if "fsdp" in row.sharding else int(is_cut),
        tp=row.tp or 1,
        pp=row.pp or 1,
        cp=row.cp or 1,
        ep=ep or row.ep or 1,
        chunks=chunks or row.chunks or 1,
        schedule=SCHEDULES.index(SCHEDULE_NAMES[row.schedule]),
        microbatch_size=row.microbatch_size or 1,
        num_microbatches=max((row.global_batch_size or 1) // (dp * (row.microbatch_size or 1)), 1),
        recompute=RECOMPUTE.index(row.recompute or "none"),
    )


SCHEDULE_NAMES: Final = {
    "": "1f1b",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved1f1b",
    "ZB-1p": "zb-1p",
    "ZB-2p": "zb-2p",
    "ZB-V": "zbv",
}


def _job(row: Row, states: StateRecipe, engine: Engine, kernels: Kernels, *, halves_products: bool = False) -> Job:
    decoder = decoder_of(row)
    compute = "fp16" if row.precision == "fp16" else "bf16"
    model = model_spec(decoder, seq_len=row.seq_len or 0, compute=compute, kernels=kernels)
    return Job(
        model=_every_second_product(model, decoder) if halves_products else model,
        global_batch_size=row.global_batch_size or 1,
        states=states,
        engine=engine,
        capacity_bytes=capacity_bytes(row),
    )


def _every_second_product(model: ModelSpec, decoder: DecoderSpec) -> ModelSpec:
    """torchtitan's selective recompute per operator: the block's input, attention's result, every second product.

    The products in order are query, key, value, output, gate, up, down: the first, third, fifth and seventh are kept
    (torchtitan/parallelisms/parallelize_llama.py, `_custom_policy`).
    """
    unit, layer = model.units[0], decoder.layers[0]
    attention, d_model = layer.attention, decoder.d_model
    products = attention.query_width + attention.n_kv_heads * attention.value_dim + layer.feed_forward.d_ff + d_model
    kept = Bytes(residual=2.0 * d_model, inner=2.0 * (products + attention.out_width) + 4.0 * attention.n_heads)
    return replace(model, units=(replace(unit, saved={**unit.saved, "selective": kept}),))


def torchtitan(row: Row) -> Setting:
    """FSDP2 with bf16 compute and fp32 masters; PyTorch's own pipelines; reserved memory, the fullest rank.

    Under TP the logits stay cut (loss_parallel): cross-entropy then needs 16 bytes a logit in place of 12 (measured
    with PyTorch's memory tracker). Interleaved pipelines have two chunks a rank where nothing else is said
    (torchtitan/parallelisms/pipelining_utils.py). Float8 keeps weights and activations in bf16 between products.
    """
    engine = Engine(
        name="torchtitan",
        compute_bytes=2,
        keeps_logits=True,
        loss_cached_bytes=2.0,
        workspace_bytes=0.0,
        allocator_low=FITTED["torchtitan allocator"],
        allocator_high=TORCHTITAN_UPPER,
    )
    kernels = KERNELS["torchtitan"]
    if (row.tp or 1) > 1:
        kernels = replace(kernels, loss_forward_bytes=14.0, loss_peak_bytes=16.0)
    job = _job(row, STATES["fsdp2"], engine, kernels, halves_products=True)
    chunks = 2 if row.schedule.startswith("Interleaved") else 1
    return Setting(row=row, job=job, candidate=candidate_of(row, chunks=chunks), figure="reserved")


def torchtitan_with_compiled_loss(row: Row) -> Setting:
    """torchtitan since 2025 compiles the loss with the model: logits and their gradient in 16 bits, no fp32 copies.

    torchtitan/components/loss.py, `build_cross_entropy_loss`.
    """
    found = torchtitan(row)
    one, both = (Bytes(inner=size * found.job.model.vocab_size) for size in (2.0, 4.0))
    model = replace(found.job.model, loss_kept=one, loss_forward=one, loss_peak=both)
    return replace(found, job=replace(found.job, model=model, engine=replace(found.job.engine, loss_cached_bytes=0.0)))


def _megatron_engine(row: Row) -> Engine:
    """Gradients go into one fp32 buffer as they come; norms are gathered again; outputs of a stage are freed."""
    return Engine(
        name="Megatron-LM",
        compute_bytes=2,
        reduce_bytes=0.0,
        regathers_norms=row.says("sequence parallel"),
        sequence_parallel=row.says("sequence parallel"),
        receives_all=False,
        keeps_outputs=False,
        caches_transient=False,
        workspace_bytes=MEGATRON_WORKSPACE_BYTES,
    )


def megatron(row: Row) -> Setting:
    """Megatron-LM's functional tests: bytes allocated on the last rank, so on the last stage.

    Attention without a fused kernel keeps 5 bytes a score: softmax, its dropout mask, and what is left. Experts are cut
    by their own tensor parallelism. Where the last stage's layers are given by hand, all stages are priced like it.
    """
    on_last = row.said_number("decoder-last-pipeline-num-layers")
    if on_last:
        row = replace(row, n_layers=on_last * (row.pp or 1))
    is_unfused = row.attention == "unfused" or (row.attention == "auto" and row.says("impl local"))
    kernels = KERNELS["megatron-unfused" if is_unfused else "megatron"]
    if row.says("cross-entropy-loss-fusion True"):  # compiled, and no longer in place: logits, fp32 copy, exponentials
        kernels = replace(kernels, loss_forward_bytes=10.0, loss_peak_bytes=10.0)
    states = STATES["megatron-fp16" if row.precision == "fp16" else "megatron"]
    tp, expert_tp = row.tp or 1, row.said_number("expert-tensor-parallel-size") or row.tp or 1
    candidate = candidate_of(row, ep=(row.ep or 1) * expert_tp // tp)
    job = _job(row, states, _megatron_engine(row), kernels)
    return Setting(row=row, job=job, candidate=candidate, stages=("last",), figure="allocated")


def zero_bubble(row: Row) -> Setting:
    """Megatron-LM of 2023 without a fused attention; the figures printed as GB are GiB."""
    job = _job(row, STATES["megatron"], _megatron_engine(row), KERNELS["megatron-unfused"])
    return Setting(row=row, job=job, candidate=candidate_of(row), figure="allocated")


def deepspeed(row: Row) -> Setting:
    """Megatron-DeepSpeed with ZeRO-1 for BLOOM, by nvidia-smi.

    fp16: 2 + 2, and 12 + 4 cut, an fp32 copy of the gradients for the step. bf16: fp32 gradients besides, not cut.
    Buckets of 5e8 numbers for reductions and for gathers.
    """
    states = STATES["megatron-fp16"]
    if row.says("bf16 optimizer"):
        states = replace(STATES["megatron"], name="deepspeed-bf16", gradient_bytes=6.0)
    if row.optimizer.startswith("8-bit"):
        states = replace(states, name="deepspeed-8bit", optimizer_bytes=states.optimizer_bytes - 6.0)
    engine = replace(
        _megatron_engine(row),
        name="Megatron-DeepSpeed",
        workspace_bytes=2 * 5e8 * 2,
        allocator_low=FITTED["deepspeed allocator"],
        allocator_high=FITTED["deepspeed allocator"],
        context_bytes=1.5 * GIB,
    )
    job = _job(row, states, engine, KERNELS["megatron-unfused"])
    return Setting(row=row, job=job, candidate=candidate_of(row), figure="device")


def internevo(row: Row) -> Setting:
    """InternEvo's hybrid ZeRO: bf16 weights and gradients, fp32 masters and moments; by the driver.

    FSDP reduces gradients at each of the four microbatches.
    """
    engine = replace(
        _megatron_engine(row),
        name="InternEvo",
        sequence_parallel=False,
        regathers_norms=False,
        update_bytes=FITTED["internevo step, bytes"],
        allocator_low=1.0,
        allocator_high=1.0,
    )
    job = _job(row, STATES["zero-paper"], engine, KERNELS["cuda"])
    return Setting(row=row, job=job, candidate=replace(candidate_of(row), sync_every=1), figure="device")


def torchtune(row: Row) -> Setting:
    """One device, all in bf16; active bytes. Eager norms keep fp32 copies; chunks of the loss: 8."""
    is_compiled, is_chunked = row.compiled == "yes", row.compiled == "yes" and not row.says("+ compile;")
    kernels = replace(KERNELS["cuda" if is_compiled else "hf"], loss_peak_bytes=5.5 if is_chunked else 14.0)
    engine = Engine(name="torchtune", compute_bytes=2, copies=False, workspace_bytes=0.0)
    job = _job(row, STATES["bf16"], engine, kernels)
    return Setting(row=row, job=job, candidate=candidate_of(row), figure="allocated", transient=True)


PROGRAMS: Final = {
    "torchtitan-202412": torchtitan,
    "torchtitan-2024-a100": torchtitan,
    "torchtitan-h200": torchtitan_with_compiled_loss,
    "megatron-ci": megatron,
    "zerobubble-t4": zero_bubble,
    "zerobubble-t6": zero_bubble,
    "bloom-prequel": deepspeed,
    "bloom-1b3-v100": deepspeed,
    "bloom-104b-v100": deepspeed,
    "internevo-mem": internevo,
    "torchtune-ladder": torchtune,
}
