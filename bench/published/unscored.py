"""Rows that are not scored, each with its reason: a setting that the prediction needs is not in the source."""

from __future__ import annotations

from typing import Final

from published.rows import Row


def reason(row: Row) -> str | None:
    """Why a row is not scored; None if it is."""
    for words, said in OPTIONS.items():
        if row.source_key == "megatron-ci" and row.says(words):
            return said
    return ROWS.get(row.id) or SOURCES.get(row.source_key) or None


OPTIONS: Final = {
    "release run": "number of devices and batch of the run are not stated",
    "defer-embedding-wgrad-compute True": "an option that holds the head's gradients back, which no formula here has",
}
"""By words of the notes of a Megatron test."""

SOURCES: Final = {
    "torchtitan-nvfp4": "recompute mode not stated",
    "aws-torchtitan": "microbatch and recompute mode not stated beside the figure",
    "torchao-pretrain": "microbatch and recompute mode not stated beside the figure",
    "torchao-moe": "which of the two layers has experts, and the shared expert, are not stated",
    "torchao-optim": "batch and sequence length not stated",
    "torchtune-models": "optimizer, recompute mode and LoRA ranks not stated beside the figure",
    "colossalai": "architecture not stated",
    "fsdp-paper": "architecture, batch and sequence length not stated",
    "primus-pp-llama2": "batch, sequence length and recompute mode not stated",
}

ROWS: Final = {
    "torchtune-ladder-001": "samples are not packed: their length is not stated",
    "torchtune-ladder-006": "the optimizer steps inside the backward pass, which no formula here has",
    "torchtune-ladder-007": "activations are moved to the host, which no formula here has",
    "torchtune-ladder-008": "the optimizer steps inside the backward pass, activations are moved to the host",
    "torchtune-ladder-009": "LoRA rank not stated",
    "torchtune-ladder-010": "LoRA rank not stated",
}
