"""Compute types by name, and the cast of nested values: what runs and what is traced must do the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map_only

COMPUTE_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of nested containers."""
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)
