"""What was probably meant by a key that does not exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from meshwright.errors import Fault
from meshwright.spec.nearest import closest, listed
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.recipe import Recipe

_BATCH = (
    "There are two: batch.global_batch_size (samples per optimizer step, over all ranks)"
    " and batch.microbatch_size (samples per forward pass on one rank)."
)
_ACCUMULATION = "It is derived: batch.global_batch_size / (dp_degree x batch.microbatch_size)."
_EPOCHS = "Nearest: train.steps, which counts optimizer steps."
_NPROC = "Nearest: --nproc on the command line."

FOREIGN: Mapping[str, str] = {
    **dict.fromkeys(("batch_size", "batchsize", "train_batch_size", "bs"), _BATCH),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size", "per_device_batch_size"), _BATCH),
    **dict.fromkeys(("grad_accum_steps", "gradient_accumulation_steps", "accumulate_grad_batches"), _ACCUMULATION),
    **dict.fromkeys(("grad_accum", "accumulation_steps", "num_microbatches"), _ACCUMULATION),
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs", "num_train_epochs", "n_epochs"), _EPOCHS),
    **dict.fromkeys(("nproc", "world_size", "num_gpus", "gpus", "nproc_per_node", "num_processes"), _NPROC),
    "dp": "Nearest: layout.dp_replicate (whole copies) or layout.dp_shard (ZeRO).",
}
"""Names from other tools, and what to say here."""

SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("learning_rate", "max_lr", "base_lr"), "optimizer.lr"),
    **dict.fromkeys(("max_steps", "num_steps", "max_iters", "total_steps", "iterations"), "train.steps"),
    **dict.fromkeys(("num_layers", "n_layer", "num_hidden_layers", "depth", "layers"), "model.n_layers"),
    **dict.fromkeys(("hidden_size", "n_embd", "dim", "hidden_dim", "embed_dim"), "model.d_model"),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "heads"), "model.n_heads"),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_head"), "model.n_kv_heads"),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "mlp_dim"), "model.d_ff"),
    **dict.fromkeys(("block_size", "max_length", "context_length", "sequence_length"), "data.seq_len"),
    **dict.fromkeys(("grad_clip", "clip_grad", "clip_grad_norm", "gradient_clip_val"), "optimizer.max_grad_norm"),
    **dict.fromkeys(("dtype", "amp", "mixed_precision", "bf16", "fp16", "fp64"), "precision.compute"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_schedule"), "schedule.name"),
    **dict.fromkeys(("warmup", "num_warmup_steps", "warmup_iters"), "schedule.warmup_steps"),
    **dict.fromkeys(("zero", "stage", "sharding_strategy"), "layout.zero_stage"),
    **dict.fromkeys(("fsdp", "shard"), "layout.dp_shard"),
    **dict.fromkeys(("ddp", "replicas"), "layout.dp_replicate"),
    **dict.fromkeys(("tensor_parallel", "tensor_parallel_size", "tp_size"), "layout.tp"),
    **dict.fromkeys(("pipeline_parallel", "pipeline_parallel_size", "pp_size"), "layout.pp"),
    **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing"), "train.recompute"),
    **dict.fromkeys(("save_every", "save_steps", "checkpoint_every"), "checkpoint.every_steps"),
    **dict.fromkeys(("eval_every", "eval_steps", "val_check_interval"), "validation.every_steps"),
    "deterministic": "train.reduction",
    "num_workers": "data.workers",
    "tie_word_embeddings": "model.tied_embeddings",
}
"""Other spellings of a key, and its path here."""


def unknown_key(section: str, name: str, keys: Iterable[str]) -> Fault:
    """The refusal of `section.name`, with the key that was probably meant.

    Args:
        section: the section it stands in; empty for the top of the file.
        name: the key.
        keys: what exists there.
    """
    keys = list(keys)
    where = f"{section}.{name}" if section else name
    rule = f"[{section}] has no such key." if section else "is no section of a recipe."
    elsewhere = [path for path in paths() if path.split(".")[1] == name and path.split(".")[0] != section]
    own = closest(name, keys, 0.75)
    if elsewhere and not own:
        return Fault(where, rule, f"Nearest: {listed(elsewhere[:3])}.")
    return Fault(where, rule, _meant(section, name, keys, own))


def _meant(section: str, name: str, keys: list[str], own: str | None) -> str:
    prefix = f"{section}." if section else ""
    if name.lower() in FOREIGN:
        return FOREIGN[name.lower()]
    if name.lower() in SYNONYMS:
        return f"Nearest: {SYNONYMS[name.lower()]}."
    if own or (own := closest(name, keys)):
        return f"Nearest: {prefix}{own}."
    anywhere = closest(name, [path.split(".")[1] for path in paths()], 0.75)
    if anywhere:
        return f"Nearest: {next(path for path in paths() if path.split('.')[1] == anywhere)}."
    return f"{'Keys' if section else 'Sections'}: {', '.join(keys)}."


def paths() -> list[str]:
    """Every key path of a recipe, the options of the optimizers among them."""
    found = [f"{name}.{key}" for name, section in sections().items() for key in section_keys(section)]
    options = {option: None for known in OPTIMIZERS.values() for option in known.options}
    return found + [f"optimizer.{option}" for option in options]


def sections() -> dict[str, type]:
    """Section names with their dataclasses, in the order of the docs."""
    import meshwright.spec.sections as home

    return {field.name: getattr(home, str(field.type)) for field in fields(Recipe)}


def section_keys(section: type) -> list[str]:
    """The declared keys of a section: its fields but for the open table."""
    return [field.name for field in fields(section) if not field.metadata.get("open")]
