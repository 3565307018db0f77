"""A model's buffers as they were: for forward passes that must leave no trace in batch statistics."""

from __future__ import annotations

from typing import final

import torch.nn as nn


@final
class KeptBuffers:
    """Copies of all buffers, and which tensor stood under each name (a model may put another one there)."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def put_back(self) -> None:
        """Make every buffer what it was."""
        for module, name, buffer, before in self._kept:
            module._buffers[name] = buffer
            # Through `.data`, which autograd does not watch: a backward pass to come may need this buffer, and finds it
            # as it was.
            buffer.data.copy_(before)
