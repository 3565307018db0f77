"""What a plan is made of: options, rungs, rejections, advice. Frozen values, which report/ prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, final

from meshwright.cost.candidate import RECOMPUTE, Candidate
from meshwright.cost.explain import explain
from meshwright.cost.memory import Memory
from meshwright.cost.quantities import Job
from meshwright.cost.traffic import explain_traffic
from meshwright.plan.search import Found, is_planned, runs
from meshwright.spec.estimate import MemoryEstimate, Term

GIB: Final = 2**30


def gib(amount: float) -> str:
    """Bytes as people read them: `66.3 GiB`; below a tenth of a GiB in MiB."""
    if 0 < amount < GIB / 10:
        return f"{amount / 2**20:,.1f} MiB"
    return f"{amount / GIB:,.1f} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One candidate, priced and explained.

    Attributes:
        candidate: its layout and knobs.
        memory: of its fullest rank at its fullest moment.
        sent: bytes that its busiest rank sends in a step, by axis.
        runs: this version runs it; else it is planned.
    """

    candidate: Candidate
    memory: MemoryEstimate
    sent: tuple[Term, ...]
    runs: bool

    @property
    def word(self) -> str:
        """The layout in one word."""
        return self.candidate.word

    @property
    def phrase(self) -> str:
        """The layout with what else is special: `zero3x8 with full recompute`."""
        one = self.candidate
        parts = [f"{RECOMPUTE[one.recompute]} recompute"] if one.recompute else []
        parts += ["offloaded optimizer state"] if one.offload else []
        return f"{self.word} with {' and '.join(parts)}" if parts else self.word

    @property
    def fits(self) -> Literal["yes", "tight", "no"]:
        """The verdict on memory."""
        return self.memory.fits

    @property
    def reserved_bytes(self) -> int:
        """What may be reserved of the device's memory."""
        return self.memory.reserved_bytes

    @property
    def shortfall_bytes(self) -> int:
        """By how much it misses the device's memory; 0 if it fits."""
        return max(0, self.memory.reserved_bytes - self.memory.capacity_bytes)

    @property
    def is_planned(self) -> bool:
        """Uses cp, ep or offload."""
        return bool(is_planned(self.candidate))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One step of the rule: start with data parallelism, then ZeRO, then TP inside a node, then PP between nodes.

    Attributes:
        name: single | ddp | zero1 | zero2 | zero3 | hsdp | tp | pp | full recompute | planned.
        option: its best candidate; None if there is no legal one.
        because: why it fits or not, with numbers.
        fix: what would make it fit; empty if it does.
        is_legal: its candidate breaks no rule.
    """

    name: str
    option: Option | None
    because: str
    fix: str = ""
    is_legal: bool = True

    @property
    def fits(self) -> Literal["yes", "tight", "no"]:
        """The verdict on its best candidate."""
        return self.option.fits if self.option and self.is_legal else "no"

    @property
    def shortfall_bytes(self) -> int | None:
        """By how much it misses; None if there is nothing to measure."""
        return self.option.shortfall_bytes if self.option else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a layout is not among the choices.

    Attributes:
        layout: its word.
        rule: the id of the rule, or `memory`.
        because: the rule with its numbers.
        nearest: what works in its place.
        option: its best candidate, where it was legal and priced.
    """

    layout: str
    rule: str
    because: str
    nearest: str
    option: Option | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many candidates there were.

    Attributes:
        considered: combinations of layout and knobs.
        legal: that break no rule.
        fitting: of these, that fit the memory.
        rejected: by the rule that they break first; `memory` for those that are legal and do not fit.
    """

    considered: int
    legal: int
    fitting: int
    rejected: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """The fewest devices of the cluster's kind on which the workload fits.

    Attributes:
        num_devices: how many.
        nodes: in how many nodes.
        option: the layout that fits there.
    """

    num_devices: int
    nodes: int
    option: Option


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What else a user wants to know about a choice.

    Attributes:
        purchase: the fewest devices that fit; None if no number up to the limit of the search does.
        largest_microbatch: that still fits the chosen layout; None without a choice.
        largest_seq_len: that still fits the chosen layout and microbatch; None without a choice, or where unknown.
        lines: sentences: the batch, the learning rate, uneven stages, padding.
    """

    purchase: Purchase | None = None
    largest_microbatch: int | None = None
    largest_seq_len: int | None = None
    lines: Sequence[str] = field(default_factory=tuple)


@final
class Options:
    """Explains the candidates of a search, each once."""

    def __init__(self, job: Job, found: Found) -> None:
        self._job, self._found, self._made = job, found, dict[int, Option]()

    def at(self, place: int) -> Option:
        """The legal candidate at that place."""
        if place not in self._made:
            found = self._found
            self._made[place] = option_of(self._job, found.columns.at(place), found.memory.at(place))
        return self._made[place]


def option_of(job: Job, candidate: Candidate, memory: Memory | None = None) -> Option:
    """Explain one candidate, whose memory may be known."""
    return Option(
        candidate=candidate,
        memory=explain(job, candidate, memory),
        sent=explain_traffic(job, candidate),
        runs=bool(runs(candidate)),
    )


def why(option: Option) -> str:
    """How much memory an option needs of how much, with its largest terms where it does not fit."""
    memory = option.memory
    needs = f"{option.phrase} needs {gib(memory.reserved_bytes)} of {gib(memory.capacity_bytes)}"
    if memory.fits == "yes":
        return f"{needs}."
    if memory.fits == "tight":
        return f"{needs}: it fits, with less than a tenth to spare."
    largest = sorted(memory.terms, key=lambda term: -term.amount)[:3]
    terms = ", ".join(f"{term.name} {gib(term.amount)}" for term in largest)
    return f"{needs}, {gib(option.shortfall_bytes)} too many: {terms}."
