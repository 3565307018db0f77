"""The Python face: a user's own loop is the same training as `train()`, and its mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

import meshwright
from meshwright.errors import MeshwrightError, SpecError
from train.small import Net, Points, cross_entropy, loss

STEPS = 6


def prepare(**changes: Any) -> Any:
    """A setup() call on this rank; the ranks of the pool have joined their world already."""
    settings = dict(model=Net, data=Points(60), loss=loss, lr=0.05, optimizer="sgd", precision="fp64", seed=5)
    settings |= dict(global_batch_size=12, microbatch_size=2, loading={"workers": 0}, schedule={"name": "linear"})
    return meshwright.setup(**settings | changes)


def with_train(run: Any, step: Any) -> None:
    step.train()


def by_hand(run: Any, step: Any) -> None:
    for microbatch in step.microbatches():
        total, count = cross_entropy(run.model(microbatch.batch["x"]), microbatch.batch["labels"])
        microbatch.backward(total, count)
    step.update()


def drive(how: Callable[[Any, Any], None], **changes: Any) -> dict[str, Any]:
    """A whole run: losses, rates and the digest of the weights."""
    run = prepare(**changes)
    results = []
    for step in run.steps(STEPS):
        how(run, step)
        results.append((step.number, step.loss, step.result.lr, step.result.grad_norm))
    summary = dict(run.summary, results=results)
    run.close()
    return summary


def launched(n: int, how: Callable[[Any, Any], None], **changes: Any) -> dict[str, Any]:
    summary = meshwright.launch(partial(drive, how, **changes), nproc=n, timeout_s=20)
    assert summary is not None
    return summary


@pytest.mark.parametrize("n", [1, 2])
def test_a_step_taken_apart_is_the_step_bit_for_bit(n: int) -> None:
    whole, apart = launched(n, with_train), launched(n, by_hand)
    assert apart["weights_sha256"] == whole["weights_sha256"]
    assert apart["results"] == whole["results"]


def test_the_same_loop_on_one_and_three_processes() -> None:
    single, three = launched(1, by_hand), launched(3, by_hand)
    for (step, *one), (other, *many) in zip(single["results"], three["results"], strict=True):
        assert step == other
        # fp64: sums of 6 microbatches in another order
        assert many == pytest.approx(one, rel=1e-11)


def test_clipping_schedule_and_dropout_hold_in_a_hand_written_step() -> None:
    changes = dict(train={"steps": 1}, optimizer={"name": "sgd", "max_grad_norm": 0.01})
    assert launched(2, by_hand, **changes)["weights_sha256"] == launched(2, with_train, **changes)["weights_sha256"]
    rates = [rate for _, _, rate, _ in launched(1, by_hand)["results"]]
    assert rates == pytest.approx([0.05 * (1 - i / STEPS) for i in range(STEPS)], rel=1e-12)


def resumed(folder: str, first: int, second: int) -> list[dict[str, Any]]:
    saves = {"run_dir": folder, "checkpoint": {"every_steps": 3}}
    stops = {"train": {"stop_after": 3}}
    return [launched(first, with_train, **saves, **stops), launched(second, by_hand, resume=True, **saves)]


@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 2), (1, 2), (3, 1)])
def test_a_run_resumed_on_another_number_of_processes_goes_on(tmp_path, first: int, second: int) -> None:
    before, after = resumed(str(tmp_path / "run"), first, second)
    whole = launched(second, with_train)
    assert [step for step, *_ in before["results"]] == [1, 2, 3]
    assert [step for step, *_ in after["results"]] == [4, 5, 6]
    losses = [loss for _, loss, *_ in before["results"] + after["results"]]
    assert losses == pytest.approx([loss for _, loss, *_ in whole["results"]], rel=1e-11)
    if first == second:
        assert after["weights_sha256"] == whole["weights_sha256"]


def test_your_own_optimizer_and_module_object() -> None:
    from functools import partial as bound

    named = launched(1, with_train, optimizer={"name": "adam", "betas": [0.8, 0.9], "fused": False})
    made = launched(1, with_train, optimizer=bound(torch.optim.Adam, betas=(0.8, 0.9)))
    assert made["weights_sha256"] == named["weights_sha256"]


def skipped_step(run: Any) -> None:
    for _ in run.steps(2):
        pass


def no_backward(run: Any) -> None:
    for step in run.steps(2):
        for _ in step.microbatches():
            pass


def two_backwards(run: Any) -> None:
    for step in run.steps(2):
        for microbatch in step.microbatches():
            for _ in range(2):
                microbatch.backward(*cross_entropy(run.model(microbatch.batch["x"]), microbatch.batch["labels"]))


def update_first(run: Any) -> None:
    next(iter(run.steps(2))).update()


def result_first(run: Any) -> None:
    print(next(iter(run.steps(2))).loss)


def test_a_loop_by_hand_cannot_compute_a_step_again_as_exact_mode_may_have_to() -> None:
    run = prepare(precision="fp32", train={"reduction": "exact"})
    with pytest.raises(SpecError, match=r"step.microbatches\(\): with train.reduction exact.* Nearest: step.train\(\)"):
        no_backward(run)
    run.close()


def summary_first(run: Any) -> None:
    print(run.summary)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (skipped_step, "was not trained"),
        (no_backward, "had no backward"),
        (two_backwards, "had its backward already"),
        (update_first, "has no gradients"),
        (result_first, "has no result before"),
        (summary_first, "exists after the last step"),
    ],
)
def test_mistakes_in_a_hand_written_loop_are_named(mistake: Callable[[Any], None], said: str) -> None:
    run = prepare()
    with pytest.raises(SpecError, match=said):
        mistake(run)
    run.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"global_batch_size": 0, "lr": -1.0}, ["batch.global_batch_size", "optimizer.lr"]),
        ({"resume": True}, ["needs run_dir"]),
        ({"schedule": {"name": "cosin"}}, ["schedule.name", "cosine"]),
        ({"shedule": {"name": "cosine"}}, ["shedule", "schedule"]),
        ({"data": []}, ["empty"]),
        ({"data": iter([1])}, ["map-style"]),
        ({"model": lambda: 3}, ["torch.nn.Module"]),
        ({"optimizer": "adamm"}, ["adam"]),
        ({"precision": "fp8"}, ["precision.compute", "bf16"]),
        ({"batchsize": 3}, ["batchsize"]),
        ({"layout": {"dp_replicate": 3}}, ["3", "1 process"]),
    ],
)
def test_a_wrong_setup_is_refused_with_every_fault(changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(MeshwrightError) as caught:
        prepare(**changes)
    for part in said:
        assert part in str(caught.value)


def test_a_refused_setup_leaves_the_world_so_that_the_next_may_join() -> None:
    for _ in range(2):
        with suppress(MeshwrightError):
            prepare(data=[])
    run = prepare()
    assert [step.train().step for step in run.steps(2)] == [1, 2]
    run.close()


def test_a_second_setup_is_refused_and_leaves_the_first_alone() -> None:
    run = prepare()
    with pytest.raises(SpecError, match=r"run\.close\(\)"):
        prepare()
    assert [step.train().step for step in run.steps(2)] == [1, 2]
    run.close()


def test_the_length_of_a_training_stays_once_it_has_begun() -> None:
    run = prepare()
    assert [step.train().step for step in run.steps(2)] == [1, 2]
    with pytest.raises(SpecError, match=r"Nearest: run\.steps\(2\)"):
        list(run.steps(4))
    run.close()


def test_a_loop_that_is_left_early_says_that_its_steps_are_not_saved(tmp_path, capfd) -> None:
    run = prepare(run_dir=tmp_path / "run")
    for step in run.steps(4):
        step.train()
        if step.number == 2:
            break
    run.close()
    assert "ended at step 2 of 4" in capfd.readouterr().err


def uneven_steps(n: int) -> None:
    run = prepare()
    for step in run.steps(n + run.world.rank):
        step.train()


def test_ranks_that_ask_for_other_numbers_of_steps_are_told() -> None:
    with pytest.raises(MeshwrightError, match=r"ranks ask for \[4, 5\] steps"):
        meshwright.launch(partial(uneven_steps, 4), nproc=2, timeout_s=20)


def nan_count(model: torch.nn.Module, batch: Any) -> Any:
    total, count = loss(model, batch)
    return total, count * float("nan")


def test_a_count_that_is_no_number_skips_the_step() -> None:
    run = prepare(loss=nan_count, train={"on_nonfinite": "skip"})
    assert all(step.train().skipped for step in run.steps(2))
    run.close()


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("short", torch.ones(3, dtype=torch.uint16))


def test_buffers_of_any_type_are_compared_between_ranks(tmp_path) -> None:
    done = launched(2, with_train, model=Complex, run_dir=str(tmp_path / "run"), checkpoint={"every_steps": 2})
    assert done["step"] == STEPS
