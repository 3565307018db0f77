"""Your own nn.Module and data on any number of processes: a convolutional classifier of handwritten digits.

    python examples/own_module.py --nproc 2
    torchrun --nproc-per-node 2 examples/own_module.py

Any number of processes that divides the batch of 48 gives the same losses; compare them with --nproc 1.
"""

import argparse
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import meshwright


class Digits(nn.Module):
    """Two convolutions and a linear layer: (b, 1, 8, 8) -> (b, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),  # (b, 16, 4, 4)
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(),  # (b, 512)
        )  # fmt: skip
        self.classify = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (b, 1, 8, 8) to logits (b, 10)."""
        return self.classify(self.features(images))


def dataset() -> TensorDataset:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0  # (1797, 1, 8, 8)
    return TensorDataset(images, torch.tensor(digits.target))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """A sum and a count: meshwright divides once, by the count over all microbatches of all processes."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def main(steps: int, by_hand: bool, precision: str) -> dict:
    run = meshwright.setup(
        model=Digits,
        data=dataset(),
        loss=loss,
        optimizer="adamw",
        lr=3e-3,
        global_batch_size=48,
        microbatch_size=8,
        precision=precision,
        validation={"fraction": 0.2},
    )
    for step in run.steps(steps):
        if by_hand:  # the same step, taken apart
            for microbatch in step.microbatches():
                images, labels = microbatch.batch
                images = images.to(next(run.bare_model.parameters()).dtype)
                total = F.cross_entropy(run.model(images), labels, reduction="sum")
                microbatch.backward(total, len(labels))
            step.update()
        else:
            step.train()
        if run.world.rank == 0 and step.number % 10 == 0:
            print(f"step {step.number}  loss {step.loss:.6f}")
    if run.world.rank == 0:
        print(f"held-out loss {run.summary['validation_loss']:.4f}, weights {run.summary['weights_sha256'][:16]}")
    return run.summary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    meshwright.launch(partial(main, options.steps, options.by_hand, options.precision), nproc=options.nproc)
