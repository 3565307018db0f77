"""The fitted numbers, and the rows that each was fitted on. Those rows are never scored.

`make validate` prints what the fit gives now beside each (published/measure.py).
"""

from __future__ import annotations

from typing import Final

from published.rows import GIB

FITTED: Final = {
    "torchtitan allocator": 1.015,
    "megatron workspace, GiB": 0.089,
    "deepspeed allocator": 1.154,
    "internevo step, bytes": 16.81,
}
"""Reserved over allocated and cached bytes in PyTorch's allocator under torchtitan: eager, compiled, compiled Float8.

Workspaces of cuBLAS and TransformerEngine inside the allocator: what measured persistent memory has beyond the states.

Reserved over allocated bytes under Megatron-DeepSpeed, from the driver's view less context and buckets.

Bytes per parameter that InternEvo's optimizer step takes besides the states: fp32 copies of the gradients, as they came
and unscaled, and the numbers of an update that is not fused.
"""

FIT_ROWS: Final = {
    "torchtitan allocator": tuple(f"torchtitan-202412-00{n}" for n in (1, 2, 3)),
    "megatron workspace, GiB": tuple(f"megatron-ci-0{n}" for n in (11, 12, 13, 14, 15)),
    "deepspeed allocator": tuple(f"bloom-prequel-00{n}" for n in (1, 2, 3, 4, 5, 6)),
    "internevo step, bytes": tuple(f"internevo-mem-00{n}" for n in (2, 6, 7, 9)),
}

TORCHTITAN_UPPER: Final = 1.08
"""For the upper estimate: above the largest of the three rows' own ratios (eager; 1.062)."""

MEGATRON_WORKSPACE_BYTES: Final = FITTED["megatron workspace, GiB"] * GIB


def is_fit_row(row_id: str) -> bool:
    """Was a number fitted on this row?"""
    return any(row_id in rows for rows in FIT_ROWS.values())
