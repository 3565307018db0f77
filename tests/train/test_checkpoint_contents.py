"""What is in a checkpoint: only JSON and safetensors, names of the bare module, ties, and digests that agree."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickletools
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel

import meshwright
from meshwright.cli.main import main
from meshwright.errors import CheckpointError, MeshwrightError, RunError, SpecError
from meshwright.models.anatomy import parameters_in_order, repeated_blocks, tied_groups
from meshwright.models.build import build_reference
from meshwright.models.digest import state_items
from meshwright.parallel.leaves import Leaf
from meshwright.spec.load import from_table, load
from meshwright.spec.shape import resolve_shape
from meshwright.train import checkpoint, stored
from meshwright.train.run import begin_run
from meshwright.train.trainer import Parts
from ranks import RanksFailed
from train.parity import SEQ_LEN
from train.runs import changed, run_in, save_tiny, small_table, state_of, steps_in, summary_of
from train.test_resume_position import Numbers, matrix, squared_error


def gpt2_table(**changes: Any) -> dict[str, Any]:
    """Tied embeddings."""
    table = small_table("adamw", "fp32", steps=4, checkpoint={"every_steps": 2})
    table["model"] = {"name": "gpt2", "n_layers": 1, "d_model": 36, "n_heads": 4, "d_ff": 50, "vocab_size": 131}
    return changed(table, **changes)


@pytest.fixture(scope="module")
def tied_run(run_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied") / "run"
    run_ranks(2, run_in, gpt2_table(), str(folder))
    return folder


def independent_digest(path: Path) -> str:
    """DESIGN's weights_sha256, from its words alone."""
    total = hashlib.sha256()
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            dtype, shape = str(tensor.dtype).split(".")[1], ",".join(str(size) for size in tensor.shape)
            total.update(b"".join(text.encode("utf-8") + b"\0" for text in (name, dtype, shape)))
            total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def command(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 0
    return capsys.readouterr().out.strip()


def test_all_digests_of_a_run_agree(tied_run, capsys) -> None:
    newest = tied_run / "checkpoints/step-00000004"
    digest = independent_digest(newest / "model.safetensors")
    assert command("checkpoint", "digest", str(tied_run), capsys=capsys) == digest
    assert command("checkpoint", "digest", str(newest), capsys=capsys) == digest
    assert json.loads((newest / "manifest.json").read_text())["weights_sha256"] == digest
    assert summary_of(tied_run)["weights_sha256"] == digest
    listed = json.loads(command("checkpoint", "ls", str(tied_run), "--json", capsys=capsys))
    assert listed[0]["weights_sha256"] == digest
    assert listed[1]["weights_sha256"] == independent_digest(tied_run / "checkpoints/step-00000002/model.safetensors")
    assert listed[1]["weights_sha256"] != digest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_the_digest_without_torch_knows_every_type(tmp_path, dtype) -> None:
    tensors = {
        "b.x": torch.arange(6).reshape(2, 3).to(dtype),
        "a": torch.ones((), dtype=dtype),
        "é": torch.ones(0).to(dtype),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    assert stored.weights_sha256(tmp_path / "m.safetensors") == independent_digest(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\xff" * 30,
        b"\x02" + b"\0" * 7 + b"{}",
        b"\x0a" + b"\0" * 7 + b'{"a": [1]}',
        b"\x06" + b"\0" * 7 + b"[1, 2]",
    ],
)
def test_a_broken_model_file_is_a_checkpoint_error_or_an_empty_digest(tmp_path, content) -> None:
    (tmp_path / "m").write_bytes(content)
    if content.endswith(b"{}"):
        assert stored.weights_sha256(tmp_path / "m") == hashlib.sha256().hexdigest()
        return
    with pytest.raises(CheckpointError, match="safetensors"):
        stored.weights_sha256(tmp_path / "m")


def test_nothing_in_a_run_folder_is_pickled(tied_run) -> None:
    files = [path for path in tied_run.rglob("*") if path.is_file()]
    kinds = {path.relative_to(tied_run).parts[0] if path.parent == tied_run else path.name for path in files}
    assert kinds == {
        "manifest.json", "model.safetensors", "optimizer.safetensors",
        "metrics.jsonl", "samples.jsonl", "recipe.toml", "summary.json",
    }  # fmt: skip
    for path in files:
        content = path.read_bytes()
        with pytest.raises(Exception):  # noqa: B017 -- pickletools raises what it likes for what is no pickle
            list(pickletools.genops(content))
        assert not content.startswith(b"PK")  # torch.save's zip
        if path.suffix == ".json":
            json.loads(content)
        if path.suffix == ".safetensors":
            assert load_file(path)


def test_a_stranger_can_read_the_recipe_the_step_and_the_digests_without_torch(tied_run) -> None:
    manifest = json.loads((tied_run / "checkpoints/step-00000004/manifest.json").read_text())
    assert manifest["step"] == 4 and manifest["format"] == 1 and manifest["layout"] == "ddp2"
    assert from_table(manifest["recipe"]) == load(tied_run / "recipe.toml")
    for name, facts in manifest["files"].items():
        content = (tied_run / "checkpoints/step-00000004" / name).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def fresh_gpt2(seed: int = 9) -> nn.Module:
    recipe = from_table(gpt2_table())
    return build_reference(resolve_shape(recipe.model, SEQ_LEN, None), seed)


def test_a_tied_tensor_is_stored_once_and_comes_back_tied(tied_run, tmp_path, capsys) -> None:
    """B076, B077"""
    output = tmp_path / "deep/weights.safetensors"
    said = command("checkpoint", "export", str(tied_run), "--output", str(output), capsys=capsys)
    assert said.startswith(f"{output}: weights of step 4, sha256 ")
    assert independent_digest(output) == summary_of(tied_run)["weights_sha256"]
    tensors = load_file(output)
    assert "embedding.weight" in tensors and "head.weight" not in tensors

    model = fresh_gpt2()
    assert not torch.equal(model.embedding.weight, tensors["embedding.weight"])
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, tensors["embedding.weight"])


def resumed_tie(world: Any, table: dict[str, Any], folder: str) -> list[bool]:
    with contextlib.closing(
        begin_run(from_table(table), Path(folder), resume=True, world=world, progress=False)
    ) as run:
        model = run.trainer.model
        saved = load_file(Path(folder, "checkpoints/step-00000004/model.safetensors"))
        held = dict(state_items(model))
        return [
            model.head.weight is model.embedding.weight,
            tied_groups(model) == [["embedding.weight", "head.weight"]],
            sorted(held) == sorted(saved) and all(torch.equal(held[name], saved[name]) for name in saved),
        ]


def test_resuming_keeps_the_tie_and_fills_every_parameter(run_ranks, tied_run) -> None:
    """B076: on ranks, into a model that was built anew."""
    for held in run_ranks(2, resumed_tie, gpt2_table(), str(tied_run)):
        assert held == [True, True, True]


class Statistics(nn.Module):
    """Parameters, a persistent buffer, one that is not, a scalar, a view of a larger tensor, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())  # not contiguous
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.inner(batch) * self.scale + self.turned.sum() * 0.01


def buffers_table() -> dict[str, Any]:
    table = small_table("sgd", "fp32", steps=4)
    table["model"] = {"build": "train.test_checkpoint_contents:Statistics"}
    table["data"] = {"build": "train.test_resume_position:Numbers", "workers": 0}
    table["loss"] = {"build": "train.test_resume_position:squared_error"}
    table["batch"] = {"global_batch_size": 4, "microbatch_size": 2}
    return table


def test_buffers_scalars_and_frozen_weights_are_saved_and_continue(run_ranks, tmp_path) -> None:
    table = buffers_table()
    run_ranks(1, run_in, table, str(tmp_path / "whole"))
    run_ranks(1, run_in, changed(table, train={"stop_after": 2}), str(tmp_path / "cut"))
    run_ranks(1, run_in, table, str(tmp_path / "cut"), True)
    weights = load_file(tmp_path / "cut/checkpoints/step-00000004/model.safetensors")
    assert sorted(weights) == ["frozen", "inner.bias", "inner.weight", "scale", "seen", "turned"]
    assert weights["seen"].item() == 8 and weights["turned"].shape == (4, 3)
    assert summary_of(tmp_path / "cut") == summary_of(tmp_path / "whole")


class Sharing(nn.Module):
    """Two parameters over one memory, a complex and an unsigned buffer, and state of a form of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight.data = self.a.weight.data
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("scales", torch.arange(2).to(torch.uint16))

    def get_extra_state(self) -> dict[str, int]:
        return {"mine": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        raise AssertionError("what was not saved is not set")

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.a(batch) + self.b(batch)


def test_odd_tensors_are_saved_and_what_is_not_saved_is_said(run_ranks, tmp_path, capsys) -> None:
    table = buffers_table()
    table["model"] = {"build": "train.test_checkpoint_contents:Sharing"}
    (whole,) = run_ranks(1, run_in, table, str(tmp_path / "whole"))
    assert whole.err == "warning: checkpoints hold parameters and buffers, and not the extra state of Sharing\n"
    run_ranks(1, run_in, changed(table, train={"stop_after": 2}), str(tmp_path / "cut"))
    (told,) = run_ranks(1, run_in, table, str(tmp_path / "cut"), True)
    weights = load_file(tmp_path / "whole/checkpoints/step-00000004/model.safetensors")
    assert sorted(weights) == ["a.weight", "b.weight", "scales", "turns"]
    assert torch.equal(weights["turns"], Sharing().turns) and weights["scales"].dtype == torch.uint16
    digest = command("checkpoint", "digest", str(tmp_path / "whole"), capsys=capsys)
    assert (
        digest
        == whole.summary["weights_sha256"]
        == independent_digest(tmp_path / "whole/checkpoints/step-00000004/model.safetensors")
    )
    assert told.summary["weights_sha256"] == digest


class Blocks(nn.Module):
    """A list of blocks with dropout, and a batch norm: everything that names are used for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 4)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            batch = batch + block(batch)
        return self.norm(batch)


def whole_compiled() -> nn.Module:
    return torch.compile(Blocks(), backend="eager")  # type: ignore[return-value]


def blocks_compiled() -> nn.Module:
    model = Blocks()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="eager")  # type: ignore[call-overload]
    return model


def spread_in(world: Any, folder: str, make: str, resume: bool) -> tuple[list[str], dict[str, Any]]:
    """Train on Python objects: bare, or wrapped by torch.compile."""
    table = buffers_table()
    model = {"bare": Blocks, "whole": whole_compiled, "blocks": blocks_compiled}[make]
    parts = Parts(model=model, data=Numbers(), loss=squared_error)
    begun = begin_run(from_table(table), Path(folder), resume=resume, world=world, parts=parts, progress=False)
    with contextlib.closing(begun) as run:
        stream = run.trainer.stream(run.start.step, run.end)
        for _ in range(run.start.step, run.end):
            run.step(stream)
        return [name for name, _ in repeated_blocks(run.trainer.model)], run.finish()


MATRIX = pytest.mark.matrix  # compiling takes seconds


@pytest.mark.parametrize(
    ("make", "n"),
    [
        ("blocks", 2),
        pytest.param("whole", 2, marks=MATRIX),
        pytest.param("blocks", 1, marks=MATRIX),
        pytest.param("whole", 1, marks=MATRIX),
    ],
)
def test_a_compiled_model_saves_the_names_of_the_bare_one(run_ranks, tmp_path, make, n) -> None:
    """B075: trained from compile(DDP(model))'s side, it equals the bare one in names, digests and bits."""
    (blocks, summary), *_ = run_ranks(n, spread_in, str(tmp_path / "bare"), "bare", False)
    (compiled_blocks, compiled), *_ = run_ranks(n, spread_in, str(tmp_path / make), make, False)
    assert blocks == compiled_blocks == ["blocks.0", "blocks.1"]
    weights = load_file(tmp_path / make / "checkpoints/step-00000004/model.safetensors")
    assert sorted(weights) == sorted(Blocks().state_dict())
    moments = load_file(tmp_path / make / "checkpoints/step-00000004/optimizer.safetensors")
    assert {key.partition("/")[2] for key in moments} == {name for name, _ in Blocks().named_parameters()}
    # torch.compile's "eager" backend runs the same kernels, so bits are equal.
    assert compiled["weights_sha256"] == summary["weights_sha256"]
    Blocks().load_state_dict(weights)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("whole", "bare"), pytest.param("bare", "whole", marks=MATRIX), pytest.param("blocks", "whole", marks=MATRIX)],
)
def test_a_checkpoint_of_a_compiled_model_continues_in_a_bare_one_and_the_reverse(
    run_ranks, tmp_path, saved, resumed
) -> None:
    """B075"""
    (_, whole), _ = run_ranks(2, spread_in, str(tmp_path / "whole"), "bare", False)
    run_ranks(2, spread_in, str(tmp_path / "cut"), saved, False)
    for step in steps_in(tmp_path / "cut")[-1:]:
        (tmp_path / f"cut/checkpoints/step-{step:08d}").rename(tmp_path / "gone")
    (_, told), _ = run_ranks(2, spread_in, str(tmp_path / "cut"), resumed, True)
    assert told["weights_sha256"] == whole["weights_sha256"]


def test_names_of_wrapped_modules_are_bare_everywhere() -> None:
    """B075"""
    for model in (whole_compiled(), blocks_compiled()):
        names = [name for name, _ in parameters_in_order(model)]
        assert names == sorted(name for name, _ in Blocks().named_parameters())
        assert [name for name, _ in state_items(model)] == sorted(Blocks().state_dict())


def wrapped_in(world: Any, folder: str) -> None:
    parts = Parts(model=DistributedDataParallel(matrix()), data=Numbers(), loss=squared_error)
    begin_run(from_table(buffers_table()), Path(folder), resume=False, world=world, parts=parts)


def test_a_model_that_is_wrapped_by_ddp_already_is_refused(run_ranks, tmp_path) -> None:
    with pytest.raises(SpecError, match=r"is wrapped by DistributedDataParallel already\. Give the bare module"):
        run_ranks(2, wrapped_in, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def loop(world: Any, folder: str, who_saves: str, timeout_s: float) -> list[int]:
    """The Python API's loop, in which run.save() is called by all ranks, or by one."""
    joined = contextlib.nullcontext(world)
    with mock.patch("meshwright.api.join_world", return_value=joined), contextlib.redirect_stdout(io.StringIO()):
        run = meshwright.setup(
            model=matrix, data=Numbers(), loss=squared_error, lr=0.1, global_batch_size=4,
            loading={"workers": 0}, run_dir=folder, checkpoint={"keep_last": 9}, train={"timeout_s": timeout_s},
        )  # fmt: skip
        for step in run.steps(5):
            step.train()
            if who_saves == "all" or (step.number == 3 and world.rank == int(who_saves)):
                run.save()
                run.save()
    return steps_in(Path(folder))


def test_saving_twice_on_two_ranks_does_not_hang(run_ranks, tmp_path) -> None:
    """B066"""
    assert run_ranks(2, loop, str(tmp_path), "all", 10.0, timeout_s=10.0) == [[1, 2, 3, 4, 5]] * 2


def save_before_training(world: Any, folder: str) -> int:
    begun = begin_run(
        from_table(buffers_table()), Path(folder), resume=True, world=world,
        parts=Parts(model=matrix, data=Numbers(), loss=squared_error), progress=False,
    )  # fmt: skip
    with contextlib.closing(begun) as run:
        run.save()
        return run.start.checkpoint is not None


def test_a_checkpoint_of_step_0_is_one_too(run_ranks, tmp_path) -> None:
    assert [run_ranks(2, save_before_training, str(tmp_path)) for _ in range(2)] == [[False, False], [True, True]]
    assert steps_in(tmp_path) == [0]


@pytest.mark.parametrize("who", ["0", "1"])
def test_saving_on_one_rank_alone_ends_by_a_message_that_names_it(run_ranks, tmp_path, who) -> None:
    """B063: the ranks that went on wait for it in vain, and nothing is mixed up meanwhile."""
    begin = time.perf_counter()
    with pytest.raises((RunError, RanksFailed), match=rf"rank {who} .*checkpoint of step 3") as caught:
        run_ranks(2, loop, str(tmp_path), who, 3.0, timeout_s=3.0)
    assert time.perf_counter() - begin < 20.0  # the time-out of 3 s, the supervisor's grace and the start
    assert "was the furthest behind" in str(caught.value) or "did not come to the collective" in str(caught.value)
    assert steps_in(tmp_path) == []


def disagree(world: Any, folder: str) -> None:
    """One rank's weights differ by one bit when it is time to save."""
    begun = begin_run(
        from_table(buffers_table()), Path(folder), resume=False, world=world,
        parts=Parts(model=matrix, data=Numbers(), loss=squared_error), progress=False,
    )  # fmt: skip
    with contextlib.closing(begun) as run:
        stream = run.trainer.stream(0, run.end)
        run.step(stream)
        if world.rank == 1:
            with torch.no_grad():
                run.trainer.model[0].bias[0] = torch.nextafter(run.trainer.model[0].bias[0], torch.tensor(9.0))
        run.save()


def test_weights_that_differ_between_ranks_are_not_saved(run_ranks, tmp_path) -> None:
    with pytest.raises(MeshwrightError, match=r"weights at step 1: differ between ranks: 0\.bias"):
        run_ranks(2, disagree, str(tmp_path))
    assert steps_in(tmp_path) == []


def test_loading_into_another_model_names_what_differs(tmp_path) -> None:
    found = stored.read(save_tiny(tmp_path, 3))
    for model, words in (
        (nn.Linear(3, 4), "has in another shape: bias, weight"),
        (nn.Linear(3, 2, bias=False), "has beyond the model's: bias"),
        (nn.Sequential(nn.Linear(3, 2)), "lacks: 0.bias, 0.weight"),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=words):
            leaves = [Leaf(name, parameter, parameter) for name, parameter in model.named_parameters()]
            checkpoint.load(found, state_of(model, optimizer, leaves))
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_one_rank_that_cannot_see_the_checkpoint_is_named(run_ranks, tmp_path) -> None:
    table = small_table("sgd", "fp32", steps=4, train={"stop_after": 2})
    run_ranks(2, run_in, table, str(tmp_path))
    with pytest.raises(MeshwrightError, match=r"rank 1: .*model.safetensors.*Every rank needs to see the run folder"):
        run_ranks(2, blind_in, table, str(tmp_path))


def blind_in(world: Any, table: dict[str, Any], folder: str) -> None:
    """Rank 1 looks where nothing is."""
    if world.rank == 1:
        read = checkpoint._reading
        checkpoint._reading = lambda path: read(Path("/nowhere") / path.name)
    begin_run(from_table(table), Path(folder), resume=True, world=world, progress=False)
