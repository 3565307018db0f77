"""Layout: how a workload is cut over ranks, its one-word spelling, and the place of each rank in it.

The identities, and the grammar of the word:

    world_size = pp * dp_replicate * dp_shard * tp      outermost first, so tp ranks are neighbours
    dp_degree  = dp_replicate * dp_shard

    word      single | PART+PART+...
    PART      ddpR | zeroZxS | hsdpRxS (stage 3) | hsdpRxSzZ | tpT | ppP      degrees from 2 up, one data-parallel part
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.errors import LayoutError
from meshwright.spec.nearest import around, closest, divisors, listed, multiples_around
from meshwright.spec.sections import CHUNKED_SCHEDULES, LayoutSection

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
DEGREES = ("dp_replicate", "dp_shard", "tp", "pp")


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism that make sense together.

    Attributes:
        dp_replicate: replicas that hold whole weights or whole shard groups, >= 1.
        dp_shard: ranks over which ZeRO cuts, >= 1.
        zero_stage: 0 nothing is cut, 1 optimizer state, 2 + gradients, 3 + parameters; 0 exactly if dp_shard is 1.
        tp: ranks over which every matrix is cut, >= 1.
        pp: pipeline stages, >= 1.

    Raises:
        LayoutError: a degree below 1, or a stage that contradicts dp_shard.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    zero_stage: int = 0
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        """Refuse what no mesh can be built from."""
        for name in DEGREES:
            if getattr(self, name) < 1:
                raise LayoutError(f"layout.{name}", f"is {getattr(self, name)}; a degree is at least 1.", "Nearest: 1.")
        broken = stage_conflict(self.dp_shard, self.zero_stage)
        if broken:
            raise LayoutError("layout.zero_stage", *broken)

    @property
    def world_size(self) -> int:
        """Number of ranks: pp * dp_replicate * dp_shard * tp."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp_degree(self) -> int:
        """Ranks that see different samples: dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def word(self) -> str:
        """The layout in one word: `single`, `ddp2`, `zero3x4+tp2`; `parse_layout` reads it back."""
        parts = [self._data_parallel_word()]
        parts += [f"{name}{degree}" for name, degree in (("tp", self.tp), ("pp", self.pp)) if degree > 1]
        return "+".join(part for part in parts if part) or "single"

    def _data_parallel_word(self) -> str:
        if self.dp_shard == 1:
            return f"ddp{self.dp_replicate}" if self.dp_replicate > 1 else ""
        if self.dp_replicate == 1:
            return f"zero{self.zero_stage}x{self.dp_shard}"
        stage = "" if self.zero_stage == 3 else f"z{self.zero_stage}"
        return f"hsdp{self.dp_replicate}x{self.dp_shard}{stage}"

    def coordinates(self, rank: int) -> dict[str, int]:
        """Index of a rank on each axis, pp outermost, then dp_replicate, dp_shard, and tp innermost.

        Raises:
            LayoutError: the rank is not in 0 .. world_size - 1.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank}", f"{self.word} has ranks 0 to {self.world_size - 1}.")
        indices, rest = {}, rank
        for axis in reversed(AXES):
            rest, indices[axis] = divmod(rest, getattr(self, axis))
        return {axis: indices[axis] for axis in AXES}

    def dp_rank(self, rank: int) -> int:
        """Place of a rank among the dp_degree ranks that see different samples: 0 .. dp_degree - 1."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def last_rank_of(self, dp_rank: int) -> int:
        """The rank that knows the losses of a data-parallel rank: on the last stage, the first of its tp ranks."""
        return ((self.pp - 1) * self.dp_degree + dp_rank) * self.tp


def stage_conflict(dp_shard: int, zero_stage: int) -> tuple[str, str] | None:
    """The rule that a ZeRO stage breaks beside dp_shard, and the nearest that works; None if they agree."""
    if not 0 <= zero_stage <= 3:
        return f"is {zero_stage}; ZeRO has stages 0 to 3.", f"Nearest: {min(max(zero_stage, 0), 3)}."
    if zero_stage == 0 and dp_shard > 1:
        rule = f"is 0 with layout.dp_shard = {dp_shard}; stage 0 cuts nothing, so there is nothing to shard."
        return rule, f"Nearest: zero_stage 1, 2 or 3, or dp_replicate = {dp_shard} with dp_shard = 1."
    if zero_stage > 0 and dp_shard == 1:
        rule = f"is {zero_stage} with layout.dp_shard = 1; stage {zero_stage} needs at least 2 ranks to cut over."
        return rule, "Nearest: zero_stage 0, or dp_shard = 2."
    return None


def resolve(section: LayoutSection, nproc: int | None, available: int = 1) -> Layout:
    """Close a `[layout]` for a number of processes.

    What is left out is 1, except that dp_replicate fills what the processes leave, and zero_stage is 0 if dp_shard
    is 1, else 3.

    Args:
        section: the degrees that were asked for.
        nproc: processes; None means the layout's product, or `available` if no degree was asked for.
        available: devices of this machine, >= 1.

    Raises:
        LayoutError: the degrees contradict each other or do not multiply to `nproc`.
    """
    stage = section.zero_stage if section.zero_stage is not None else (0 if section.dp_shard == 1 else 3)
    inner = Layout(dp_shard=section.dp_shard, zero_stage=stage, tp=section.tp, pp=section.pp)
    if nproc is None:
        open_section = section.dp_replicate is None and inner.world_size == 1
        nproc = available if open_section else inner.world_size * (section.dp_replicate or 1)
    if nproc < 1:
        raise LayoutError(f"--nproc {nproc}", "a run has at least 1 process.", "Nearest: --nproc 1.")
    if section.dp_replicate is None:
        if nproc % inner.world_size:
            raise _remainder(inner, nproc)
        return replace(inner, dp_replicate=nproc // inner.world_size)
    layout = replace(inner, dp_replicate=section.dp_replicate)
    if layout.world_size != nproc:
        raise _wrong_product(layout, nproc)
    return layout


def _remainder(inner: Layout, nproc: int) -> LayoutError:
    size = inner.world_size
    rule = f"dp_shard {inner.dp_shard} x tp {inner.tp} x pp {inner.pp} = {size} does not divide {nproc} processes."
    near = f"--nproc {listed(multiples_around(nproc, size))}"
    for name in ("dp_shard", "tp", "pp"):
        degree = getattr(inner, name)
        rest = size // degree
        if degree > 1 and nproc % rest == 0:
            near += f"; {name} = {listed(around(degree, divisors(nproc // rest)))}"
    return LayoutError(f"layout {inner.word} on --nproc {nproc}", rule, f"Nearest: {near}.")


def _wrong_product(layout: Layout, nproc: int) -> LayoutError:
    factors = " x ".join(f"{name} {getattr(layout, name)}" for name in AXES)
    rest = layout.world_size // layout.dp_replicate
    near = f"--nproc {layout.world_size}"
    if nproc % rest == 0:
        near += f", or dp_replicate = {nproc // rest} (what leaving it out gives)"
    rule = f"{factors} = {layout.world_size}, not {nproc} processes."
    return LayoutError(f"layout {layout.word} on --nproc {nproc}", rule, f"Nearest: {near}.")


def section_of(layout: Layout, other: LayoutSection = LayoutSection()) -> LayoutSection:  # noqa: B008 -- frozen
    """The `[layout]` that resolves to this layout on its own world size and on no other.

    Args:
        layout: its degrees.
        other: whose keys that are no degrees it keeps.
    """
    return replace(
        other,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        zero_stage=layout.zero_stage,
        tp=layout.tp,
        pp=layout.pp,
    )


def chunks_of(section: LayoutSection) -> int:
    """Stages that each rank of a pipeline has: 2 where the schedule has several and none is asked for, else 1."""
    if section.pp == 1 or section.pp_schedule not in CHUNKED_SCHEDULES:
        return 1
    return section.pp_chunks or 2


def parse_layout(word: str) -> Layout:
    """Read a layout word; parts may stand in any order, `Layout.word` prints the usual one.

    Raises:
        LayoutError: not a layout word, a part twice, a degree of 0 or 1, a stage that does not exist.
    """
    parts = [part.strip() for part in word.strip().lower().split("+")]
    if parts == ["single"]:
        return Layout()
    degrees: dict[str, int] = {}
    for part in parts:
        found = _part(part, word)
        _refuse_second(word, degrees, found)
        degrees |= found
    return Layout(**degrees)


def _part(part: str, word: str) -> dict[str, int]:
    import re  # Words are read once a run at most, and `re` keeps what it compiled.

    if part == "single":
        raise LayoutError(f'layout "{word}"', "`single` is one process and joins nothing.", "Leave it out of the word.")
    found = re.fullmatch(
        r"(ddp|tp|pp)(\d{1,9})|(zero)(\d)x(\d{1,9})|(hsdp)(\d{1,9})x(\d{1,9})(?:z(\d))?", part, re.ASCII
    )
    if not found:
        raise LayoutError(f'layout "{word}"', f'"{part}" is no part of a layout word.', _nearest_words(part))
    degrees = _degrees([group for group in found.groups() if group is not None])
    small = {name: degree for name, degree in degrees.items() if name != "zero_stage" and degree < 2}
    for name, degree in small.items():
        near = _without(degrees, small)
        raise LayoutError(f'layout "{word}"', f'"{part}" has {name} {degree}; a part has degrees of at least 2.', near)
    broken = stage_conflict(degrees.get("dp_shard", 1), degrees.get("zero_stage", 0))
    if broken:
        near = listed(f"`{replace(Layout(**(degrees | {'zero_stage': stage}))).word}`" for stage in (1, 2, 3))
        shard_word = f"`ddp{degrees.get('dp_replicate', 1) * degrees['dp_shard']}`"
        rule = f'"{part}" has ZeRO stage {degrees["zero_stage"]}; a cut has stage 1, 2 or 3.'
        raise LayoutError(f'layout "{word}"', rule, f"Nearest: {near}; nothing cut: {shard_word}.")
    return degrees


def _degrees(groups: list[str]) -> dict[str, int]:
    kind, numbers = groups[0], [int(group) for group in groups[1:]]
    match kind:
        case "ddp":
            return {"dp_replicate": numbers[0]}
        case "zero":
            return {"zero_stage": numbers[0], "dp_shard": numbers[1]}
        case "hsdp":
            return {"dp_replicate": numbers[0], "dp_shard": numbers[1], "zero_stage": [*numbers, 3][2]}
        case _:
            return {kind: numbers[0]}


def _without(degrees: dict[str, int], small: dict[str, int]) -> str:
    legal = {name: degree for name, degree in degrees.items() if name not in small}
    if "dp_shard" not in legal:
        legal.pop("zero_stage", None)
    elif not 1 <= legal.get("zero_stage", 3) <= 3:
        legal["zero_stage"] = 3
    return f"Nearest: `{Layout(**legal).word}`."


def _nearest_words(part: str) -> str:
    """The word with the same numbers whose kind is most like the one written."""
    kind = part.rstrip("0123456789x_-= z") or part
    names = {"ddp": "ddp2", "dp": "ddp2", "fsdp": "zero3x2", "zero": "zero3x2", "hsdp": "hsdp2x2", "tp": "tp2"}
    names |= {"pp": "pp2", "single": "single"}
    like = closest(kind, names, 0.5)
    digits = "".join(letter if letter.isdecimal() else " " for letter in part).split()
    degree = next((int(text) for text in reversed(digits) if len(text) <= 9 and int(text) > 1), None)
    if part in ("zero1", "zero2", "zero3"):
        return f"Nearest: `{part}x2`, on 2 ranks."
    if like is None:
        return "Parts are `single`, `ddp2`, `zero3x2`, `hsdp2x4`, `hsdp2x4z1`, `tp2` and `pp2`, joined by `+`."
    near = names[like] if degree is None or like in ("single", "hsdp") else f"{names[like][:-1]}{degree}"
    return f"Nearest: `{near}`."


def _refuse_second(word: str, before: dict[str, int], again: dict[str, int]) -> None:
    asked = f'layout "{word}"'
    for name in before.keys() & again.keys():
        raise LayoutError(asked, f"{name} is given twice ({before[name]} and {again[name]}).", "Every axis once.")
    if "tp" not in again and "pp" not in again and before.keys() & {"dp_replicate", "dp_shard"}:
        merged = {name: degree for name, degree in (before | again).items() if name not in ("tp", "pp")}
        raise LayoutError(asked, "a word has one data-parallel part.", f"Nearest: `{Layout(**merged).word}`.")
