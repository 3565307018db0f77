"""Learning-rate shapes at the points where they can be worked out by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.schedule import lr_multiplier
from meshwright.spec.sections import SCHEDULE_NAMES, ScheduleSection


def rates(steps: int, **keys: object) -> list[float]:
    section = ScheduleSection(**keys)  # type: ignore[arg-type]
    return [lr_multiplier(section, steps, update) for update in range(steps + 1)]


def test_linear_over_ten_updates_is_half_after_five_and_zero_after_ten() -> None:
    found = rates(10, name="linear")
    assert found[0] == 1.0 and found[5] == 0.5 and found[10] == 0.0
    assert found == pytest.approx([1 - update / 10 for update in range(11)])


def test_warmup_starts_above_zero_and_ends_at_the_peak() -> None:
    assert rates(10, warmup_steps=4)[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(10, name="linear", warmup_steps=4)[3:5] == [1.0, 1.0]


def test_cosine_by_hand() -> None:
    found = rates(10, name="cosine", warmup_steps=2, final_fraction=0.1)
    assert found[2] == 1.0
    assert found[6] == pytest.approx(0.55)
    assert found[4] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert found[10] == pytest.approx(0.1)


def test_wsd_is_flat_and_then_linear() -> None:
    found = rates(20, name="wsd", warmup_steps=2, decay_steps=4, final_fraction=0.2)
    assert found[:2] == [0.5, 1.0]
    assert found[2:17] == [1.0] * 15
    assert found[17:] == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_wsd_decays_over_a_tenth_unless_told() -> None:
    assert rates(30, name="wsd")[27:] == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])
    assert rates(5, name="wsd")[4:] == [1.0, 0.0]


@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 50), st.data())
def test_between_final_fraction_and_peak_and_never_rising_after_warmup(
    name: str, steps: int, data: st.DataObject
) -> None:
    warmup = data.draw(st.integers(0, steps))
    final = data.draw(st.floats(0, 1))
    found = rates(steps, name=name, warmup_steps=warmup, final_fraction=final)
    assert all(0 <= rate <= 1 + 1e-12 for rate in found)
    assert found[:warmup] == sorted(found[:warmup])
    after = found[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    assert found[steps] == pytest.approx(1.0 if name == "constant" else final)


def test_past_the_end_the_last_rate_stands() -> None:
    assert lr_multiplier(ScheduleSection(name="linear", final_fraction=0.3), 10, 99) == pytest.approx(0.3)
