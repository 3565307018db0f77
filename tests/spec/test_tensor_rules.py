"""The table of tensor parallelism: what each rank has of a parameter, which degrees are legal, and its recipe key."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sound_recipes import SOUND

from meshwright.errors import Fault, SpecError
from meshwright.spec.dump import to_table, to_toml
from meshwright.spec.load import from_table, loads
from meshwright.spec.tensor_rules import (
    WORDS,
    Style,
    degree_fault,
    empty_fault,
    legal_degrees,
    local_elements,
    matches,
    parse_style,
    piece,
    reference_rules,
    rules_of,
    sequence_fault,
    share,
)

LLAMA = reference_rules("llama", 8, 2)
GPT2 = reference_rules("gpt2", 8, 8)


@given(st.integers(1, 300), st.integers(1, 9))
def test_parts_are_those_of_torch_chunk_and_cover_the_whole(size: int, tp: int) -> None:
    parts = [piece(size, None, tp, rank) for rank in range(tp)]
    assert [place for start, stop, _ in parts for place in range(start, stop)] == list(range(size))
    widths = [stop - start for start, stop, _ in parts]
    assert widths[0] == max(widths) == -(-size // tp)
    assert all(copies == 1 for _, _, copies in parts)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 7))
def test_heads_fewer_than_ranks_are_had_by_neighbours(heads: int, sharing: int, width: int) -> None:
    tp = heads * sharing
    parts = [piece(heads * width, heads, tp, rank) for rank in range(tp)]
    assert parts == [(h * width, (h + 1) * width, sharing) for h in range(heads) for _ in range(sharing)]


@pytest.mark.parametrize(
    ("name", "shape", "tp", "rank", "has"),
    [
        ("embedding.weight", (131, 48), 4, 3, (0, 99, 131, 1, False)),
        ("head.weight", (131, 48), 2, 0, (0, 0, 66, 1, False)),
        ("norm.weight", (48,), 4, 1, (None, 0, 0, 4, True)),
        ("blocks.1.norm2.weight", (48,), 2, 1, (None, 0, 0, 2, True)),
        ("blocks.1.attention.query.weight", (48, 48), 4, 1, (0, 12, 24, 1, False)),
        ("blocks.1.attention.key.weight", (12, 48), 2, 1, (0, 6, 12, 1, False)),
        ("blocks.1.attention.key.weight", (12, 48), 4, 1, (0, 0, 6, 2, True)),
        ("blocks.1.attention.value.weight", (12, 48), 8, 5, (0, 6, 12, 4, True)),
        ("blocks.1.attention.out.weight", (48, 48), 4, 3, (1, 36, 48, 1, False)),
        ("blocks.0.feed_forward.gate.weight", (101, 48), 4, 3, (0, 78, 101, 1, False)),
        ("blocks.0.feed_forward.down.weight", (48, 101), 2, 1, (1, 51, 101, 1, False)),
    ],
)
def test_what_a_rank_has_of_a_llama(name, shape, tp, rank, has) -> None:
    found = share(LLAMA, name, shape, tp, rank)
    assert (found.dim, found.start, found.stop, found.copies, found.partial) == has


def test_biases_follow_the_rows_and_are_whole_behind_columns() -> None:
    up = share(GPT2, "blocks.0.feed_forward.up.bias", (101,), 2, 1)
    assert (up.dim, up.start, up.stop) == (0, 51, 101)
    down = share(GPT2, "blocks.0.feed_forward.down.bias", (48,), 2, 1)
    assert (down.dim, down.copies, down.partial) == (None, 2, True)
    without_sequence = rules_of({"up": "column", "down": "row"})
    assert not share(without_sequence, "down.bias", (48,), 2).partial
    assert share(GPT2, "positions.weight", (12, 48), 2).partial


def test_a_rank_of_one_has_everything() -> None:
    for name in ("norm.weight", "blocks.0.attention.key.weight"):
        has = share(LLAMA, name, (12, 48), 1)
        assert not has.partial and has.copies == 1
    assert local_elements(LLAMA, "head.weight", (131, 48), 1) == 131 * 48


def test_the_most_that_a_rank_has_is_counted_without_torch() -> None:
    assert local_elements(LLAMA, "embedding.weight", (131, 48), 4) == 33 * 48
    assert local_elements(LLAMA, "blocks.0.attention.key.weight", (12, 48), 4) == 6 * 48
    assert local_elements(LLAMA, "blocks.0.feed_forward.down.weight", (48, 101), 2) == 48 * 51
    assert local_elements(LLAMA, "norm.weight", (48,), 4) == 48


def test_the_first_pattern_that_matches_counts() -> None:
    rules = rules_of({"layers.0.up": "replicated", "layers.*.up": "column:4"})
    assert rules.style_of("layers.0.up") == Style("replicated")
    assert rules.style_of_parameter("layers.3.up.weight") == Style("column", 4)
    assert rules.style_of("layers.3") is None
    assert matches("a.b.c", "a.*.c") and not matches("a.b.c", "a.*") and not matches("a.c", "a.*.c")
    assert not rules.cuts_sequence and LLAMA.cuts_sequence


@pytest.mark.parametrize(
    ("rules", "legal"),
    [
        (LLAMA, [1, 2, 4, 8]),
        (GPT2, [1, 2, 4, 8]),
        (reference_rules("llama", 12, 4), [1, 2, 4, 12]),
        (reference_rules("llama", 12, 3), [1, 3, 6, 12]),
        (reference_rules("llama", 32, 8), [1, 2, 4, 8, 16]),
        (rules_of({"up": "column", "down": "row"}), list(range(1, 17))),
    ],
)
def test_legal_degrees(rules, legal) -> None:
    assert legal_degrees(rules, 16) == legal
    assert [tp for tp in range(1, 17) if degree_fault(rules, tp) is None] == legal


def test_an_illegal_degree_names_the_heads_and_the_legal_ones() -> None:
    fault = degree_fault(LLAMA, 3, limit=8)
    assert fault is not None and fault.where == "layout.tp"
    assert "blocks.*.attention.query has 8 heads: 3 does not divide 8" in fault.rule
    assert fault.nearest == "Legal: 1, 2, 4 or 8; nearest: 2 or 4."
    fault = degree_fault(reference_rules("llama", 12, 4), 6, limit=12)
    assert fault is not None and "blocks.*.attention.key has 4 heads: 4 does not divide 6" in fault.rule
    assert "nearest: 4 or 12." in fault.nearest
    fault = degree_fault(reference_rules("llama", 8, 2), 16)
    assert fault is not None and "16 does not divide 8" in fault.rule


def test_sequences_must_divide_where_they_are_cut() -> None:
    assert sequence_fault(LLAMA, 12, 4) is None
    assert sequence_fault(rules_of({"up": "column"}), 13, 4) is None
    fault = sequence_fault(LLAMA, 13, 4)
    assert fault is not None and "13 % 4 = 1" in fault.rule and fault.nearest == "Nearest: 12 or 16."
    small = sequence_fault(LLAMA, 3, 4)
    assert small is not None and small.nearest == "Nearest: 4."


def test_a_rank_that_would_have_nothing_is_named_with_the_degrees_that_leave_some() -> None:
    shapes = {"embedding.weight": (131, 48), "blocks.0.feed_forward.up.weight": (5, 48), "norm.weight": (48,)}
    assert empty_fault(LLAMA, shapes, 1) is None and empty_fault(LLAMA, shapes, 2) is None
    fault = empty_fault(LLAMA, shapes, 4)
    assert fault is not None and "blocks.0.feed_forward.up.weight of shape (5, 48)" in fault.rule
    assert fault.nearest == "Legal under ZeRO: 1 or 2; nearest: 2."


@pytest.mark.parametrize("word", WORDS)
def test_every_word_reads_back(word: str) -> None:
    assert parse_style(word) == Style(word)
    assert str(Style(word)) == word


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("colunm", ['"colunm" is not one of column', 'Nearest: "column".']),
        ("colwise", ["is not one of", "Nearest"]),
        ("zzz", ["is not one of"]),
        ("column:", ["at least 1", 'Such as "column:8".']),
        ("row:0", ["at least 1"]),
        ("column:-2", ["at least 1"]),
        ("row:x", ["at least 1"]),
        ("head:4", ["only column and row count", 'Nearest: "head".']),
        ("", ["is not one of"]),
    ],
)
def test_a_wrong_style_is_refused_with_the_nearest(text: str, fragments: list[str]) -> None:
    fault = parse_style(text)
    assert isinstance(fault, Fault)
    assert all(fragment in str(fault) for fragment in fragments), str(fault)
    with pytest.raises(SpecError) as caught:
        loads(SOUND + f'[layout.tensor]\n"layers.*.up" = "{text}"\n')
    assert [one.where for one in caught.value.faults] == ['layout.tensor."layers.*.up"']


TENSOR = '[layout]\ntp = 2\n[layout.tensor]\n"layers.*.up" = "column:4"\n"layers.*.down" = "row:4"\n'


def test_the_table_of_a_recipe_is_read_in_its_order_and_written_again() -> None:
    recipe = loads(SOUND + TENSOR)
    assert recipe.layout.tensor == {"layers.*.up": "column:4", "layers.*.down": "row:4"}
    assert list(recipe.layout.tensor) == ["layers.*.up", "layers.*.down"]
    assert loads(to_toml(recipe)) == recipe
    assert from_table(json.loads(json.dumps(to_table(recipe)))) == recipe
    assert "tensor" not in to_table(loads(SOUND))["layout"]


def test_a_layout_word_leaves_the_other_keys_of_the_section() -> None:
    layout = loads(SOUND + TENSOR, ["layout=tp4", "layout.units=layers.*"]).layout
    assert (layout.tp, layout.units) == (4, "layers.*") and layout.tensor is not None
    layout = loads(SOUND + TENSOR, ["layout.pp_schedule=gpipe", "layout=ddp2"]).layout
    assert (layout.tp, layout.dp_replicate, layout.pp_schedule) == (1, 2, "gpipe") and layout.tensor is not None


@pytest.mark.parametrize("value", ["3", '"up"', "[1]", "{up = 3}", "{up = true}"])
def test_what_is_no_table_of_words_is_refused(value: str) -> None:
    with pytest.raises(SpecError, match="must be a table of patterns and words"):
        loads(SOUND, [f"layout.tensor={value}"])


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (["layout.pp_chunks=2"], "1f1b, which has 1 chunk a stage"),
        (["layout.pp_chunks=3", "layout.pp_schedule=gpipe"], "gpipe, which has 1 chunk"),
        (["layout.pp_chunks=3", "layout.pp_schedule=zbv"], "zbv, which has 2 chunks a stage. Nearest: 2."),
        (["layout.pp_chunks=1", "layout.pp_schedule=interleaved1f1b"], "must be at least 2. Nearest: 2."),
    ],
)
def test_chunks_that_a_schedule_cannot_have_are_refused(overrides: list[str], fragment: str) -> None:
    with pytest.raises(SpecError) as caught:
        loads(SOUND, overrides)
    assert fragment in str(caught.value)


def test_chunks_of_interleaved_schedules_are_kept() -> None:
    for schedule, chunks in (("interleaved1f1b", 4), ("interleaved-zero-bubble", 2), ("zbv", 2)):
        recipe = loads(SOUND, [f"layout.pp_chunks={chunks}", f"layout.pp_schedule={schedule}"])
        assert recipe.layout.pp_chunks == chunks and loads(to_toml(recipe)) == recipe
    assert loads(SOUND, ["layout.pp_schedule=zbv"]).layout.pp_chunks is None
