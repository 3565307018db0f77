"""Which modules are gathered one at a time: found, named by patterns, nested, and kept together where they share."""

from __future__ import annotations

import pytest
import torch.nn as nn

from meshwright.errors import SpecError
from meshwright.parallel.units import find_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(9, 4), nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 9, bias=False)


def names(model: nn.Module, patterns: list[str] | None) -> list[str]:
    """Units in their order, by name."""
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(module)] for module in find_units(model, patterns).modules]


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def test_without_patterns_units_are_the_repeated_blocks() -> None:
    assert names(Model(), None) == BLOCKS
    assert names(nn.Linear(3, 3), None) == []


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (["head"], ["head"]),
        (["blocks.?", "head"], [*BLOCKS, "head"]),
        (["blocks.*"], BLOCKS),  # and nothing within them
        (["*.0.*n"], ["blocks.0.down"]),
        (["blocks.[02]"], ["blocks.0", "blocks.2"]),
        (["head", "embedding"], ["embedding", "head"]),
        (["head", "h*d"], ["head"]),
    ],
)
def test_patterns_name_modules(patterns: list[str], wanted: list[str]) -> None:
    assert sorted(names(Model(), patterns)) == wanted


def test_inner_units_come_before_those_around_them_whatever_the_order_of_patterns() -> None:
    """FSDP must be told of inner ones first, or the outer one takes their parameters."""
    model = Model()
    for patterns in (["blocks.?", "blocks.?.up"], ["blocks.?.up", "blocks.?"]):
        found = names(model, patterns)
        assert sorted(found) == sorted([*BLOCKS, *(f"{name}.up" for name in BLOCKS)])
        assert all(found.index(f"{name}.up") < found.index(name) for name in BLOCKS)


def test_lists_that_are_never_called_and_the_model_itself_are_no_units() -> None:
    found = names(Model(), ["*", "*.*", "*.*.*"])
    assert "blocks" not in found and "" not in found and set(BLOCKS) < set(found)
    assert "blocks.0.act" not in found  # it has no parameters


def test_a_pattern_that_matches_nothing_names_the_nearest_module() -> None:
    with pytest.raises(SpecError) as caught:
        find_units(Model(), ["head", "embeding"])
    assert str(caught.value).startswith("layout.units[1] = 'embeding': matches no module with parameters")
    assert "their names are embedding, blocks, blocks.0" in str(caught.value)
    assert str(caught.value).endswith("Nearest: 'embedding'.")


def test_a_pattern_that_resembles_nothing_or_names_what_has_no_parameters_is_refused_too() -> None:
    with pytest.raises(SpecError, match="matches no module") as caught:
        find_units(Model(), ["@@@"])
    assert "Nearest" not in str(caught.value)
    with pytest.raises(SpecError, match=r"'blocks\.0\.act': matches no module with parameters"):
        find_units(Model(), ["blocks.0.act"])


def test_a_unit_that_shares_a_parameter_with_what_is_in_no_unit_stays_with_the_model() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    found = find_units(model, ["blocks.?", "head"])
    assert (found.sharing, found.modules) == (["head"], list(model.blocks))


def test_units_that_share_a_parameter_with_each_other_stay_with_the_model() -> None:
    for patterns in (None, ["blocks.?"]):
        model = Model()
        model.blocks[2].up.weight = model.blocks[0].up.weight
        found = find_units(model, patterns)
        assert (found.sharing, found.modules) == (["blocks.0", "blocks.2"], [model.blocks[1]])


def test_a_module_inside_two_units_keeps_both_with_the_model() -> None:
    """Not its parameters alone, but the whole module is held by both."""
    model = Model()
    model.blocks[2].up = model.blocks[0].up
    found = find_units(model, None)
    assert (found.sharing, found.modules) == (["blocks.0", "blocks.2"], [model.blocks[1]])


def test_sharing_inside_a_unit_divides_nothing_but_units_inside_it() -> None:
    model = Model()
    model.blocks[0].norm.bias = model.blocks[0].norm.weight  # one module, two names
    assert names(model, None) == BLOCKS
    model.blocks[0].down.bias = model.blocks[0].norm.weight  # two modules of one block
    assert names(model, None) == BLOCKS
    found = find_units(model, ["blocks.?", "blocks.?.down"])
    assert found.sharing == ["blocks.0.down"]
    assert len(found.modules) == 5 and model.blocks[0] in found.modules


def test_a_block_that_stands_in_a_list_twice_is_one_unit() -> None:
    model = Model()
    model.blocks.append(model.blocks[0])
    for patterns in (None, ["blocks.?"]):
        found = find_units(model, patterns)
        assert (found.sharing, found.modules) == ([], [model.blocks[0], model.blocks[1], model.blocks[2]])
