"""What to buy: the fewest devices that fit, and no fewer do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost.memory import estimate
from meshwright.plan.purchase import fewest_devices
from meshwright.plan.rules import first_broken
from meshwright.plan.setting import Setting
from meshwright.plan.space import Knobs, cuts_of, spread
from plan.some_models import cluster_of, dense, job_of

MODEL = dense()


def setting_of(gigabytes: float, nodes: int = 1, model=MODEL, batch: int = 1024) -> Setting:
    job = job_of(model, gigabytes=gigabytes, global_batch_size=batch)
    return Setting(job=job, cluster=cluster_of(nodes, 8, gigabytes))


def some_layout_fits(setting: Setting, size: int) -> bool:
    """Does any candidate over so many devices fit, cp, ep and offload apart?"""
    space = spread(cuts_of(size, min(size, 8), setting.job.model), setting.job.global_batch_size)
    large = replace(setting, cluster=replace(setting.cluster, nodes=1000))
    c = space.columns.take(first_broken(large, space.columns) == 0)
    plain = c.take((c.cp == 1) & (c.ep == 1) & (c.offload == 0))
    return len(plain.tp) > 0 and bool(np.any(estimate(setting.job, plain).fits > 0))


@pytest.mark.parametrize("gigabytes", [24.0, 40.0, 80.0, 400.0])
def test_no_smaller_number_of_devices_fits(gigabytes: float) -> None:
    setting = setting_of(gigabytes)
    found = fewest_devices(setting, Knobs())
    assert found is not None and found.option.fits != "no"
    assert found.option.candidate.world_size == found.num_devices
    assert found.nodes == -(-found.num_devices // 8)
    sizes = [size for size in [1, 2, 4, *range(8, 256, 8)] if size < found.num_devices]
    assert not any(some_layout_fits(setting, size) for size in sizes)


def test_what_the_cluster_has_does_not_matter() -> None:
    assert fewest_devices(setting_of(40.0, nodes=1), Knobs()) == fewest_devices(setting_of(40.0, nodes=64), Knobs())


def test_a_single_device_is_a_part_of_a_usual_node() -> None:
    setting = replace(setting_of(40.0), cluster=cluster_of(1, 1, 40.0))
    assert fewest_devices(setting, Knobs()) == fewest_devices(setting_of(40.0), Knobs())


def test_fixed_knobs_are_kept() -> None:
    free = fewest_devices(setting_of(80.0), Knobs())
    fixed = fewest_devices(setting_of(80.0), Knobs(recompute="none", microbatch_size=16))
    assert free is not None and fixed is not None
    assert fixed.num_devices > free.num_devices
    assert (fixed.option.candidate.recompute, fixed.option.candidate.microbatch_size) == (0, 16)


def test_processes_that_share_a_machine_are_not_bought() -> None:
    setting = setting_of(0.5)
    cpu = replace(setting.cluster, device=replace(setting.cluster.device, kind="cpu"))
    assert fewest_devices(replace(setting, cluster=cpu), Knobs()) is None


def test_devices_too_small_for_anything_are_not_bought() -> None:
    assert fewest_devices(setting_of(0.4, batch=1), Knobs()) is None
