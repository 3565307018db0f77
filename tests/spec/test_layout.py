"""Layout words, the place of each rank, and closing a `[layout]` for a number of processes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.spec.layout import AXES, Layout, parse_layout, resolve, section_of
from meshwright.spec.sections import LayoutSection

DEGREE = st.integers(1, 6)
LAYOUTS = st.builds(
    lambda r, s, z, t, p: Layout(r, s, z if s > 1 else 0, t, p), DEGREE, DEGREE, st.integers(1, 3), DEGREE, DEGREE
)

WORDS = [
    ("single", Layout()),
    ("ddp2", Layout(dp_replicate=2)),
    ("zero1x4", Layout(dp_shard=4, zero_stage=1)),
    ("zero3x4", Layout(dp_shard=4, zero_stage=3)),
    ("hsdp2x4", Layout(2, 4, 3)),
    ("hsdp2x4z1", Layout(2, 4, 1)),
    ("tp2", Layout(tp=2)),
    ("pp2", Layout(pp=2)),
    ("zero3x2+tp2+pp2", Layout(dp_shard=2, zero_stage=3, tp=2, pp=2)),
]


@pytest.mark.parametrize(("word", "layout"), WORDS)
def test_words(word: str, layout: Layout) -> None:
    assert parse_layout(word) == layout
    assert layout.word == word


@given(LAYOUTS, st.randoms())
def test_words_round_trip_in_any_order(layout: Layout, random: object) -> None:
    parts = layout.word.split("+")
    random.shuffle(parts)  # type: ignore[attr-defined]
    assert parse_layout("+".join(parts)) == layout
    assert parse_layout(f" {' + '.join(parts).upper()} ") == layout


def test_the_usual_stage_may_be_said() -> None:
    assert parse_layout("hsdp2x4z3").word == "hsdp2x4"


@pytest.mark.parametrize(
    ("word", "fragments"),
    [
        ("zero0x2", ["stage 0", "`zero1x2`", "`ddp2`"]),
        ("zero7x2", ["stage 7", "`zero3x2`"]),
        ("zero3x1", ["dp_shard 1", "at least 2", "`single`"]),
        ("hsdp2x1", ["dp_shard 1", "`ddp2`"]),
        ("hsdp1x4", ["dp_replicate 1", "`zero3x4`"]),
        ("hsdp2x4z0", ["stage 0", "`hsdp2x4z1`", "`ddp8`"]),
        ("ddp0", ["dp_replicate 0", "`single`"]),
        ("tp1", ["tp 1", "`single`"]),
        ("pp0+tp2", ["pp 0"]),
        ("ddp2+ddp4", ["given twice", "2 and 4"]),
        ("tp2+tp2", ["tp is given twice"]),
        ("ddp2+zero3x4", ["one data-parallel part", "`hsdp2x4`"]),
        ("single+tp2", ["joins nothing"]),
        ("fsdp4", ["no part", "`zero3x4`"]),
        ("dp8", ["no part", "`ddp8`"]),
        ("zero3", ["no part", "`zero3x2`"]),
        ("singel", ["no part", "`single`"]),
        ("tp", ["no part", "`tp2`"]),
        ("ddp-2", ["no part", "`ddp2`"]),
        ("ddp2.5", ["no part"]),
        ("ddp99999999999999999999", ["no part", "ddp"]),
        ("ddp\uff12", ["no part"]),
        ("banana", ["no part", "`single`", "joined by `+`"]),
        ("", ["no part", "joined by `+`"]),
        ("tp2+", ["no part"]),
    ],
)
def test_words_that_are_none(word: str, fragments: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_layout(word)
    assert caught.value.exit_code == 2
    for fragment in [word, *fragments]:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("degrees", "fragment"),
    [
        ({"dp_shard": 2}, "is 0 with layout.dp_shard = 2"),
        ({"zero_stage": 3}, "is 3 with layout.dp_shard = 1"),
        ({"dp_shard": 2, "zero_stage": 4}, "stages 0 to 3"),
        ({"tp": 0}, "layout.tp: is 0"),
        ({"pp": -1}, "layout.pp: is -1"),
    ],
)
def test_contradictions(degrees: dict[str, int], fragment: str) -> None:
    with pytest.raises(LayoutError, match=fragment):
        Layout(**degrees)


@given(LAYOUTS)
def test_ranks_count_through_the_axes_with_tp_innermost(layout: Layout) -> None:
    sizes = [layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp]
    expected = [dict(zip(AXES, place, strict=True)) for place in itertools.product(*map(range, sizes))]
    assert [layout.coordinates(rank) for rank in range(layout.world_size)] == expected
    assert list(layout.coordinates(0)) == ["pp", "dp_replicate", "dp_shard", "tp"]


@given(LAYOUTS)
def test_each_dp_rank_has_tp_times_pp_ranks(layout: Layout) -> None:
    ranks = [layout.dp_rank(rank) for rank in range(layout.world_size)]
    assert {rank: ranks.count(rank) for rank in ranks} == dict.fromkeys(range(layout.dp_degree), layout.tp * layout.pp)
    assert layout.world_size == layout.dp_degree * layout.tp * layout.pp


def test_a_rank_outside_the_world() -> None:
    with pytest.raises(LayoutError, match="ranks 0 to 3"):
        Layout(dp_replicate=4).coordinates(4)


@given(LAYOUTS)
def test_a_section_of_a_layout_resolves_to_it_and_to_no_other_world(layout: Layout) -> None:
    section = section_of(layout, LayoutSection(pp_schedule="gpipe", units="blocks.*"))
    assert (section.pp_schedule, section.units) == ("gpipe", "blocks.*")
    assert resolve(section, None, available=7) == layout
    assert resolve(section, layout.world_size) == layout
    with pytest.raises(LayoutError, match=f"--nproc {layout.world_size}"):
        resolve(section, layout.world_size + 1)


@given(LAYOUTS, st.integers(1, 40))
def test_dp_replicate_fills_what_the_processes_leave(layout: Layout, nproc: int) -> None:
    section = LayoutSection(dp_shard=layout.dp_shard, tp=layout.tp, pp=layout.pp)
    inner = layout.dp_shard * layout.tp * layout.pp
    if nproc % inner:
        with pytest.raises(LayoutError, match="does not divide"):
            resolve(section, nproc)
        return
    resolved = resolve(section, nproc)
    assert (resolved.world_size, resolved.dp_replicate) == (nproc, nproc // inner)
    assert resolved.zero_stage == (3 if layout.dp_shard > 1 else 0)


def test_without_a_number_of_processes() -> None:
    assert resolve(LayoutSection(), None) == Layout()
    assert resolve(LayoutSection(), None, available=8) == Layout(dp_replicate=8)
    assert resolve(LayoutSection(dp_replicate=1), None, available=8) == Layout()
    assert resolve(LayoutSection(tp=2), None, available=8) == Layout(tp=2)


@pytest.mark.parametrize(
    ("section", "nproc", "fragments"),
    [
        (LayoutSection(dp_shard=3), 4, ["= 3 does not divide 4", "--nproc 3 or 6", "dp_shard = 2 or 4"]),
        (LayoutSection(tp=2, pp=3), 8, ["= 6 does not divide 8", "--nproc 6 or 12", "pp = 2 or 4"]),
        (LayoutSection(dp_replicate=2, dp_shard=2), 8, ["= 4, not 8", "--nproc 4", "dp_replicate = 4"]),
        (LayoutSection(dp_replicate=1), 3, ["= 1, not 3", "dp_replicate = 3"]),
        (LayoutSection(dp_shard=2, zero_stage=0), 2, ["is 0 with layout.dp_shard = 2", "dp_replicate = 2"]),
        (LayoutSection(zero_stage=3), 2, ["is 3 with layout.dp_shard = 1", "dp_shard = 2"]),
        (LayoutSection(), 0, ["at least 1 process"]),
    ],
)
def test_contradictions_are_refused(section: LayoutSection, nproc: int, fragments: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        resolve(section, nproc)
    for fragment in fragments:
        assert fragment in str(caught.value)


@given(DEGREE, DEGREE, st.integers(2, 40))
def test_the_nearest_dp_shard_works(shard: int, tp: int, nproc: int) -> None:
    assume(nproc % (shard * tp))
    with pytest.raises(LayoutError) as caught:
        resolve(LayoutSection(dp_shard=shard, tp=tp), nproc)
    for hint in caught.value.nearest.removeprefix("Nearest: ").rstrip(".").split("; "):
        key, _, values = hint.replace(" = ", " ").partition(" ")
        for value in map(int, values.split(" or ")):
            degrees = {"dp_shard": shard, "tp": tp} | ({key: value} if key != "--nproc" else {})
            assert resolve(LayoutSection(**degrees), value if key == "--nproc" else nproc)
