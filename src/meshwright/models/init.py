"""Initial weights of the reference models: a function of (seed, parameter name) and nothing else.

Order of construction, device, dtype and layout play no part: every rank, whatever it holds, draws what one GPU would.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

STD = 0.02
RESIDUAL_OUTPUTS = ("attention.out.weight", "feed_forward.down.weight")
"""The matrices whose result is added to the residual stream, 2 n_layers of them."""


def initial_value(name: str, shape: torch.Size, seed: int, n_layers: int) -> Tensor:
    """What a parameter starts as: an fp32 tensor on the CPU, so that fp32 and fp64 models start from equal values.

    A tied one goes by the first of its names. Norms are 1, biases 0, and the rest normal with a standard deviation of
    0.02. The 2 n_layers branches that are added to the residual stream end in one of 0.02 / sqrt(2 n_layers), so that
    their sum does not grow with the depth.
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if "norm" in name.split(".")[-2]:
        return torch.ones(shape)
    std = STD / (2 * n_layers) ** 0.5 if name.endswith(RESIDUAL_OUTPUTS) else STD
    return torch.empty(shape, device="cpu", dtype=torch.float32).normal_(0.0, std, generator=generator(seed, name))


def generator(seed: int, name: str) -> torch.Generator:
    """A fresh CPU generator for one (seed, name)."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
