"""Gradients handed on as soon as backward has made them, parameter by parameter.

What a hook calls must not own the parameter: Python cannot see that circle, and neither the model nor what sums its
gradients would ever go. So hooks know who takes their gradients for as long as somebody else does.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Protocol

import torch


class Taker(Protocol):
    """Somebody who takes gradients from parameters."""

    def move(self, number: int, parameter: torch.Tensor) -> None:
        """Take what a parameter has, of the leaf of that number."""


def follow(parameter: torch.Tensor, number: int, taker: Taker) -> None:
    """Have each gradient of a parameter taken in backward, once it is whole; passes of weights alone do not say so."""
    hook = partial(_arrived, weakref.ref(taker), number)
    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _arrived(taker: weakref.ref[Taker], number: int, parameter: torch.Tensor) -> None:
    alive = taker()
    if alive is not None:
        alive.move(number, parameter)
