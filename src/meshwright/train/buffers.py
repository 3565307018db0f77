"""A model's buffers as they were: for forward passes that must leave no trace in batch statistics."""

from __future__ import annotations

from typing import final

import torch
import torch.nn as nn


@final
class KeptBuffers:
    """Copies of all buffers, and which tensor stood under each name (a model may put another one there)."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def put_back(self) -> None:
        """Make every buffer what it was."""
        with torch.no_grad():
            for module, name, buffer, before in self._kept:
                buffer.copy_(before)
                module._buffers[name] = buffer
