"""What is written is what was read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from sound_recipes import SOUND, TABLES

from meshwright.spec.dump import to_table, to_toml
from meshwright.spec.load import from_table, loads

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FEW
@given(TABLES)
def test_tables_and_text_read_back_equal(table: dict[str, Any]) -> None:
    recipe = from_table(table)
    dumped = to_table(recipe)
    assert from_table(dumped) == recipe
    assert from_table(json.loads(json.dumps(dumped))) == recipe
    assert loads(to_toml(recipe)) == recipe
    assert to_table(loads(to_toml(recipe))) == dumped


@FEW
@given(TABLES)
def test_what_was_given_stands_in_what_is_written(table: dict[str, Any]) -> None:
    dumped = to_table(from_table(table))
    for name, section in table.items():
        for key, value in section.items():
            assert dumped[name][key] == value


def test_a_resolved_recipe_names_every_key_that_counts() -> None:
    text = to_toml(loads(SOUND))
    assert "[train]\nsteps = 100\nseed = 0\n" in text
    assert 'name = "adamw"' in text and "rope_theta = 10000.0" in text
    assert "token_dtype" not in text and "max_seq_len" not in text and "None" not in text
    assert text.index("[model]") < text.index("[data]") < text.index("[batch]") < text.index("[train]")


@pytest.mark.parametrize(
    ("override", "absent"), [("model.name=gpt2", "rope_theta"), ("model.name=llama", "max_seq_len")]
)
def test_keys_of_the_other_model_are_left_out(override: str, absent: str) -> None:
    assert absent not in to_table(loads(SOUND, [override]))["model"]


def test_a_dump_shares_nothing_with_its_recipe() -> None:
    recipe = loads(SOUND, ["optimizer.betas=[0.9, 0.95]"])
    to_table(recipe)["optimizer"]["betas"][0] = 0.0
    assert recipe.optimizer.options == {"betas": [0.9, 0.95]}
