"""The training of recipe.toml as one would write it by hand: the other side of `make bench`.

    torchrun --nproc-per-node 2 bench/hand_loop.py bench/recipe.toml OUT --layout ddp2     the usual way
    python bench/hand_loop.py bench/recipe.toml OUT                                       one process
    python bench/hand_loop.py bench/recipe.toml OUT --layout zero3x2 --fork               one import of torch for all

What is by hand: reading the data, DDP and FSDP2, accumulation, the weighted loss, clipping, the schedule, the log,
saving. What comes from meshwright, so that both sides train the same thing: the model with its initial weights, the
layout's word, and `permute`, the shuffling function, here called once before the loop, as one calls `torch.randperm`.

ZeRO is FSDP2's `fully_shard` on each block and on the root, with the flags that make each stage (hand_fsdp.py); tensor
parallelism is torch's styles (hand_tp.py), a pipeline its 1F1B (hand_pp.py), each alone. AdamW is the fused one
everywhere: on DTensors it takes half the time of foreach.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sysconfig
import time
import tomllib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from meshwright.models.build import build_reference
from meshwright.spec.layout import Layout, parse_layout
from meshwright.spec.shape import DecoderShape
from meshwright.train.order import permute


def read_corpus() -> np.ndarray:
    """Every source file of the standard library as one array of bytes, a newline after each."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    parts = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - skipped)
        parts += [Path(folder, name).read_bytes() for name in sorted(files) if name.endswith(".py")]
    return np.frombuffer(b"\n".join(parts) + b"\n", dtype=np.uint8)


def build_model(recipe: dict[str, Any], seed: int) -> torch.nn.Module:
    model = recipe["model"]
    shape = DecoderShape(
        **{
            name: model[name] for name in ("name", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size")
        },
        head_dim=model["d_model"] // model["n_heads"],
        max_seq_len=recipe["data"]["seq_len"],
        dropout=0.0,
        tied_embeddings=False,
        norm_eps=1e-5,
        rope_theta=10000.0,
    )
    return build_reference(shape, seed).train()


def rate(step: int, steps: int, warmup: int, peak: float) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def wrap(bare: torch.nn.Module, layout: Layout) -> torch.nn.Module:
    if layout.dp_shard > 1:
        from hand_fsdp import cut  # one that trains without it does not pay for its imports

        return cut(bare, layout)
    if layout.tp > 1:
        from hand_tp import cut as cut_matrices

        return cut_matrices(bare, layout)
    return DistributedDataParallel(bare, gradient_as_bucket_view=True) if layout.world_size > 1 else bare


def microbatch(model: torch.nn.Module, layout: Layout, last: bool) -> AbstractContextManager[None]:
    """Around the forward and backward pass of a microbatch: may its backward pass leave out what the last one does?"""
    if layout.dp_shard > 1:
        from hand_fsdp import announce

        announce(model, layout, last)
    elif layout.tp > 1:
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def whole(x: Any) -> torch.Tensor:
    """A number of a DTensor's is the same on every rank once it is whole."""
    found: torch.Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return found


def train(recipe: dict[str, Any], out: Path, layout: Layout) -> None:
    rank, world, dp = int(os.environ.get("RANK", 0)), layout.world_size, layout.dp_degree
    if world > 1:
        dist.init_process_group("gloo")
    seq_len, steps, seed = recipe["data"]["seq_len"], recipe["train"]["steps"], recipe["train"].get("seed", 0)
    batch, micro = recipe["batch"]["global_batch_size"], recipe["batch"]["microbatch_size"]
    peak, warmup = recipe["optimizer"]["lr"], recipe["schedule"]["warmup_steps"]
    accumulation = batch // (dp * micro)

    corpus = read_corpus()
    rows = (len(corpus) - 1) // seq_len
    # One epoch at most, which is all that the comparison needs.
    order = permute(np.arange(steps * batch), rows, f"order/{seed}/0")
    mine = order.reshape(steps, dp, accumulation, micro)[:, rank % dp]
    window = np.arange(seq_len + 1)

    bare = build_model(recipe, seed)
    if layout.pp > 1:
        from hand_pp import Pipeline, clip

        pipeline = Pipeline(bare, layout, accumulation)
        bare = model = pipeline.part
    else:
        model, clip = wrap(bare, layout), torch.nn.utils.clip_grad_norm_
    parameters = list(bare.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=peak, weight_decay=recipe["optimizer"]["weight_decay"], fused=True)
    log = (out / "metrics.jsonl").open("w", buffering=1) if rank == 0 else None
    tokens, began = 0, time.perf_counter()

    for step in range(steps):
        picked = [torch.from_numpy(corpus[ids[:, None] * seq_len + window].astype(np.int64)) for ids in mine[step]]
        count = torch.tensor(float(sum(x[:, 1:].numel() for x in picked)))
        if dp > 1:
            dist.all_reduce(count)
        total = pipeline.step(picked, count) if layout.pp > 1 else torch.zeros(())
        for i, x in enumerate(picked if layout.pp == 1 else ()):
            with microbatch(model, layout, last=i == accumulation - 1):
                logits = model(x[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum")
                (loss * (dp / count)).backward()  # DDP and FSDP divide by their ranks
            total += whole(loss.detach())
        norm = whole(clip(parameters, recipe["optimizer"]["max_grad_norm"]))
        lr = rate(step, steps, warmup, peak)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        if layout.tp == 1 and world > 1:
            dist.all_reduce(total)
        tokens += int(count)
        if log is not None:
            now = time.perf_counter()
            row = {"step": step + 1, "loss": (total / count).item(), "lr": lr, "grad_norm": norm.item()}
            log.write(json.dumps(row | {"tokens": tokens, "seconds": now - began}) + "\n")

    if layout.dp_shard > 1 or layout.tp > 1:
        from hand_fsdp import save

        save(bare, optimizer, out / "last")
    elif rank == 0 or layout.pp > 1:
        torch.save(
            {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}, out / f"last{rank}.pt"
        )
    if world > 1:
        dist.destroy_process_group()


def forked(rank: int, recipe: dict[str, Any], out: Path, layout: Layout) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(layout.world_size))
    train(recipe, out, layout)


def fork(recipe: dict[str, Any], out: Path, layout: Layout) -> None:
    import socket

    import torch.multiprocessing as mp

    if layout.dp_shard > 1 or layout.tp > 1:
        import hand_fsdp  # noqa: F401 -- once, before the ranks are forked
    if layout.tp > 1:
        import hand_tp  # noqa: F401
    if layout.pp > 1:
        import hand_pp  # noqa: F401

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    mp.start_processes(forked, (recipe, out, layout), layout.world_size, start_method="fork")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train recipe.toml by hand")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--layout", type=parse_layout, default=Layout(), help="ddp2, zero3x2, ... (default: single)")
    parser.add_argument("--fork", action="store_true", help="fork the ranks instead of being started by torchrun")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    described = tomllib.loads(options.recipe.read_text())
    described["train"]["steps"] = options.steps or described["train"]["steps"]
    (fork if options.fork else train)(described, options.out, options.layout)
