"""Peak memory of one FSDP2 step on a fake process group, as PyTorch's FSDP memory tracker counts it.

Run as a script, as a fake process group is one for the whole process: MODEL WORLD_SIZE -> one line of JSON. The
optimizer is SGD, whose state is none: under fake tensors the tracker counts that of others wrongly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.models.anatomy import repeated_blocks
from meshwright.models.gpt2 import Gpt2
from meshwright.models.llama import Llama
from meshwright.spec.shape import DecoderShape

MICROBATCH, SEQ_LEN, VOCAB = 2, 512, 8003


def decoder(name: str, **sizes: int) -> DecoderShape:
    tied = name == "gpt2"
    return DecoderShape(
        name=name, vocab_size=VOCAB, max_seq_len=SEQ_LEN, dropout=0.0, tied_embeddings=tied, norm_eps=1e-5,
        rope_theta=1e4, **sizes,
    )  # fmt: skip


def llama() -> nn.Module:
    return Llama(decoder("llama", n_layers=6, d_model=520, n_heads=10, n_kv_heads=2, head_dim=52, d_ff=1387))


def gpt2() -> nn.Module:
    return Gpt2(decoder("gpt2", n_layers=5, d_model=516, n_heads=6, n_kv_heads=6, head_dim=86, d_ff=2064))


class Encoder(nn.Module):
    """Blocks of torch's own, in a list of the user's: no decoder of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 384)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(384, 6, 1111, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(7)
        )
        self.head = nn.Linear(384, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "encoder": Encoder}


def peak(build: Callable[[], nn.Module], world_size: int) -> dict[str, int]:
    """The fullest moment of one step on rank 0, by the tracker's categories, in bytes."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    mesh = init_device_mesh("cpu", (world_size,))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build()
        for _, block in repeated_blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=half)
        fully_shard(model, mesh=mesh, mp_policy=half)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
        tokens = torch.zeros(MICROBATCH, SEQ_LEN, dtype=torch.int64)
        labels = torch.zeros(MICROBATCH, SEQ_LEN, dtype=torch.int64)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((tokens, labels))
        with tracker:
            logits = model(tokens).float()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            del logits
            loss.backward()
            optimizer.step()
    (snapshot,) = (s for device, s in tracker.get_tracker_snapshot("peak").items() if device.type == "cpu")
    return {str(getattr(category, "value", category)): size for category, size in snapshot.items()}


if __name__ == "__main__":
    print(json.dumps(peak(MODELS[sys.argv[1]], int(sys.argv[2]))))
