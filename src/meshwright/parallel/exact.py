"""Exact mode: gradients whose sum does not depend on how many ranks share the work, to the last bit.

Each microbatch's gradient is rounded to a grid (grid.py) and summed in fp64 without any further rounding, by FSDP2
where parameters are cut, by hand where they are not. The norm is a sum of integers. The optimizer sees whole vectors.
After Demmel and Nguyen, "Parallel reproducible summation" (2015), whose bins are the grid; here there is one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.distributed as dist

from meshwright.parallel.arrivals import follow
from meshwright.parallel.calls import Calls
from meshwright.parallel.gradients import Facts, Gradients, given
from meshwright.parallel.grid import LARGEST, LEAST_EXPONENT, Grid, require_few
from meshwright.parallel.kin import Kin, sum_over_kin
from meshwright.parallel.leaves import Leaf, local, padded_gradient
from meshwright.parallel.mesh import Group
from meshwright.parallel.taps import Taps

_LIMB: Final = 30
"""Bits of a limb of a square, scaled below 1: two of them reach below the 53 bits of what is squared."""

_EXACT_IN_FP64: Final = 1 << 22
"""So many limbs, of up to 2**30 each, are summed in fp64 without rounding, which is much faster than in integers."""

_DIGIT: Final = 24
"""Limbs are summed over ranks in digits of so many bits, in fp64: exact for up to 2**29 ranks."""

_DIGITS: Final = 3


@final
class Peaks:
    """What a rank saw of each gradient in a step: the largest magnitude, and how much the grid made zero.

    A microbatch's scalars are folded into the step's before the next one's come: left alone between its large tensors,
    they would keep the allocator from using that memory again.
    """

    def __init__(self, count: int, num_microbatches: int, device: torch.device) -> None:
        self._count, self._num_microbatches, self._device = count, num_microbatches, device
        self.clear()

    def clear(self) -> None:
        """A new step."""
        self._index = 0
        self._numbers: list[int] = []
        self._seen: list[torch.Tensor] = []
        self._found = torch.full((2, self._count), -1.0, dtype=torch.float64, device=self._device)
        self._bad = self._found.new_zeros(1)

    def at(self, index: int) -> None:
        """The next gradients are of this microbatch."""
        self._fold()
        self._index = index

    def see(self, number: int, before: torch.Tensor, after: torch.Tensor) -> None:
        """Note a gradient of the current microbatch, before and after it was rounded."""
        self._numbers.append(number)
        self._seen += [peak_of(before).double(), (before.count_nonzero() - after.count_nonzero()).double()]

    def _fold(self) -> None:
        if self._numbers:
            seen = torch.stack(self._seen).reshape(-1, 2).T.nan_to_num(nan=math.inf, posinf=math.inf)
            numbers = torch.tensor(self._numbers, device=self._device).expand(2, -1)
            self._found.scatter_reduce_(1, numbers, seen, "amax")
            behind = float(self._num_microbatches - self._index)
            self._bad = torch.maximum(self._bad, behind * (seen[0] > LARGEST).any())
        self._numbers, self._seen = [], []

    def numbers(self) -> torch.Tensor:
        """(2 count + 1,) fp64, whose maximum over ranks is taken: peaks, lost, the first bad microbatch from behind.

        A peak is -1 where there was no gradient, and infinite where one is not finite. Lost elements are those of the
        microbatch that lost most: a maximum does not depend on who had it.
        """
        self._fold()
        return torch.cat([self._found.reshape(-1), self._bad])


def peak_of(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, NaN if one is; ten times as fast on a CPU as the norm of that name."""
    if not tensor.numel():
        return tensor.new_zeros(())
    low, high = torch.aminmax(tensor.detach())
    return torch.maximum(-low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactRules:
    """What exact sums need to know besides their leaves.

    Attributes:
        names: of all trained parameters of the model, in an order that is the same on every rank.
        num_microbatches: of a step, all ranks together.
        uses: the most modules that share one parameter; each use of a tied table goes on the grid by itself.
        ranks: all ranks.
        dp_rank: place along the data-parallel axes.
        dp_degree: ranks on them.
        dp: their group.
        counts: is this rank's replica the one whose parts make up the norm?
    """

    names: Sequence[str]
    num_microbatches: int
    uses: int
    ranks: int
    dp_rank: int
    dp_degree: int
    dp: Group
    counts: bool = True


class ExactGradients(Gradients):
    """What all kinds of layout share.

    Args:
        leaves: padded.
        kin: of each.
        rules: what else there is to know.
    """

    def __init__(self, leaves: Sequence[Leaf], kin: Sequence[Kin], rules: ExactRules) -> None:
        super().__init__(leaves, factor=1.0, kin=kin)
        places = {name: i for i, name in enumerate(rules.names)}
        self.numbers = [places[leaf.name] for leaf in leaves]
        """The place of each leaf among all trained parameters of the model, of which this rank may have some."""
        self.grid = Grid(rules.names, require_few(rules.num_microbatches, rules.uses))
        self._rules, self._num_microbatches = rules, rules.num_microbatches
        self._device = local(leaves[0].parameter).device
        self._peaks = Peaks(len(rules.names), rules.num_microbatches, self._device)
        self._finals: list[torch.Tensor | None] = []
        self._largest: list[float] = []
        self._lost: list[float] = []
        self._top, self._bad = 0.0, 0

    def begin(self) -> None:
        """Forget the step before."""
        super().begin()
        self._peaks.clear()

    def at(self, index: int) -> None:
        """Whose gradients come next."""
        self._peaks.at(index)

    def rounded(self, leaf: int, gradient: torch.Tensor) -> torch.Tensor:
        """A microbatch's gradient of one use of a leaf on its grid, in fp64; as it is while there is no grid yet."""
        number = self.numbers[leaf]
        wide, shift = gradient.double(), self.grid.shift(number)
        if shift is not None:
            wide = wide + shift if wide is gradient else wide.add_(shift)
            wide.sub_(shift)
        self._peaks.see(number, gradient, wide)
        return wide

    @abstractmethod
    def _collect(self) -> list[torch.Tensor | None]:
        """This rank's parts of the sums over all microbatches of all ranks, in the masters' type."""

    def retry(self) -> str:
        """Find out together whether the gradients fit the grid."""
        self._finals = self._collect()
        tops = [peak_of(gradient).double() for gradient in self._finals if gradient is not None]
        top = torch.stack(tops).max() if tops else torch.zeros((), dtype=torch.float64, device=self._device)
        top = top.nan_to_num(nan=math.inf, posinf=math.inf)
        numbers = torch.cat([self._peaks.numbers(), top.reshape(1)])
        if self._rules.ranks > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
        *seen, bad, self._top = numbers.tolist()
        count = len(self._rules.names)
        self._largest, self._lost, self._bad = seen[:count], seen[count:], int(bad)
        if self._bad or not math.isfinite(self._top):
            return ""  # no grid helps; the step's verdict says so
        outside = self.grid.outside(self._largest)
        why = self.grid.told(self._largest, outside) if outside else ""
        self.grid.follow(self._largest)
        return why

    def summed(self) -> torch.Tensor:
        """(6,) the sum of the squares of this rank's parts: two limbs of three digits."""
        limbs = torch.zeros(2, dtype=torch.int64, device=self._device)
        if self._rules.counts and math.isfinite(self._top) and self._top > 0:
            for gradient, kin in zip(self._finals, self.kin, strict=True):
                if gradient is not None and kin.counts:
                    limbs += _square_limbs(self._share(gradient.reshape(-1)), self._scale)
        digits = [(limbs >> (_DIGIT * i)) & ((1 << _DIGIT) - 1) for i in range(_DIGITS)]
        return torch.stack(digits).double().reshape(-1)

    def _share(self, flat: torch.Tensor) -> torch.Tensor:
        """What of a part this rank adds to the norm."""
        return flat

    @property
    def _scale(self) -> float:
        """A power of two above the largest gradient: dividing by it rounds nothing."""
        return math.ldexp(1.0, max(math.frexp(self._top)[1], LEAST_EXPONENT))  # its inverse is finite too

    def known(self) -> torch.Tensor:
        """Nothing more."""
        return torch.zeros(0, dtype=torch.float64, device=self._device)

    def facts(self, summed: Sequence[float], known: Sequence[float]) -> Facts:
        """The norm from whole numbers, rounded once."""
        idle = [name for name, peak in zip(self._rules.names, self._largest, strict=True) if peak < 0]
        if self._bad:
            return Facts(math.inf, idle, self._num_microbatches - self._bad)
        if not math.isfinite(self._top):
            return Facts(math.inf, idle)
        lost = {name: int(n) for name, n in zip(self._rules.names, self._lost, strict=True) if n > 0}
        if self._top == 0.0:
            return Facts(0.0, idle, lost=lost)
        high, low = (sum(int(summed[2 * i + limb]) << (_DIGIT * i) for i in range(_DIGITS)) for limb in range(2))
        return Facts(self._scale * math.sqrt(math.ldexp((high << _LIMB) + low, -2 * _LIMB)), idle, lost=lost)

    def scale(self, factor: float) -> None:
        """Lay the parts, scaled, over whole vectors."""
        for i, leaf in enumerate(self.leaves):
            final_, self._finals[i] = self._finals[i], None
            has = self._largest[self.numbers[i]] >= 0 and final_ is not None
            leaf.leaf.grad = padded_gradient(leaf.leaf, final_, factor) if has and final_ is not None else None
            leaf.parameter.grad = None

    def state(self) -> dict[str, int]:
        """The grid."""
        return self.grid.state()

    def load(self, state: dict[str, int]) -> None:
        """Put the grid back."""
        self.grid.load(state)

    def finite(self) -> bool:
        """What `facts` says already, without a replay."""
        return not self._bad

    def drop(self) -> None:
        """Forget all gradients."""
        super().drop()
        self._finals = []


def _square_limbs(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """(2,) int64: the sum of (gradient / scale)**2 in units of 2**-30 and 2**-60; (n,) -> (2,)."""
    limbs = torch.zeros(2, dtype=torch.int64, device=gradient.device)
    for piece in torch.split(gradient, _EXACT_IN_FP64):
        square = (piece.double() * (1.0 / scale)).square_().mul_(1 << _LIMB)
        high = square.floor()
        low = square.sub_(high).mul_(1 << _LIMB).round_()
        limbs += torch.stack([high.sum(), low.sum()]).long()
    return limbs


@final
class ExactReplicas(ExactGradients):
    """Whole parameters on every rank, or on the only one: gradients are summed here, and over ranks after the last.

    Args:
        leaves: padded.
        kin: of each.
        rules: what else there is to know.
        uses: of tied parameters, those uses that have a parameter of their own while the passes run: its leaf, and it.
    """

    def __init__(
        self, leaves: Sequence[Leaf], kin: Sequence[Kin], rules: ExactRules, uses: Sequence[tuple[int, Any]] = ()
    ) -> None:
        super().__init__(leaves, kin, rules)
        sizes = [leaf.parameter.numel() for leaf in leaves]
        self._flat: torch.Tensor | None = None
        self._sizes, self._length = sizes, sum(sizes)
        self._sums: list[torch.Tensor] = []
        for number, tensor in [*((i, leaf.parameter) for i, leaf in enumerate(leaves)), *uses]:
            follow(tensor, number, self)

    def move(self, number: int, parameter: torch.Tensor) -> None:
        """Add to a leaf's sum what a parameter has, if anything."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self.add(number, gradient)

    def add(self, number: int, gradient: torch.Tensor) -> None:
        """Add a microbatch's gradient of one use of a leaf to its sum."""
        if self._flat is None:
            self._open()
        self._sums[number].add_(self.rounded(number, gradient).reshape(-1))

    def _open(self) -> None:
        self._flat = torch.zeros(self._length, dtype=torch.float64, device=self._device)
        self._sums = list(torch.split(self._flat, self._sizes))

    def _collect(self) -> list[torch.Tensor | None]:
        if self._flat is None:
            self._open()
        if self._rules.dp_degree > 1:
            dist.all_reduce(self._flat, group=self._rules.dp)
        sum_over_kin(self._sums, self.kin)
        finals = zip(self._sums, self.leaves, strict=True)
        found: list[torch.Tensor | None] = [s.to(leaf.parameter.dtype).view(leaf.parameter.shape) for s, leaf in finals]
        self._flat, self._sums = None, []
        return found

    def _share(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.tensor_split(self._rules.dp_degree)[self._rules.dp_rank]

    def drop(self) -> None:
        """Forget the sums."""
        super().drop()
        self._flat, self._sums = None, []


@final
class ExactShards(ExactGradients):
    """Cut parameters: FSDP sums the rounded gradients in fp64, as it was told to.

    Args:
        leaves: padded.
        kin: of each.
        rules: what else there is to know.
        tapped: for each parameter that is tapped its leaf; twins of a leaf are further uses of it.
        twins: parameters that stand for further uses of tied ones; FSDP has their gradients added (fsdp.py).
        taps: on the gradients of this rank's own.
        calls: of the units.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        kin: Sequence[Kin],
        rules: ExactRules,
        *,
        tapped: Sequence[int],
        twins: Sequence[torch.Tensor],
        taps: Taps,
        calls: Calls,
    ) -> None:
        super().__init__(leaves, kin, rules)
        taps.on_gradient, self._calls = self._round, calls
        self._tapped, self._twins = tapped, twins

    def begin(self) -> None:
        """Forget the step before, and its calls of units."""
        super().begin()
        self._calls.begin()

    def summed(self) -> torch.Tensor:
        """(k + 6,): k of `Calls`, and the sum of squares."""
        calls = torch.tensor(self._calls.numbers(), dtype=torch.float64, device=self._device)
        return torch.cat([calls, super().summed()])

    def facts(self, summed: Sequence[float], known: Sequence[float]) -> Facts:
        """As for whole parameters, once the ranks are known to have called the same units."""
        split = len(summed) - 2 * _DIGITS
        self._calls.require_same(summed[:split], self._rules.ranks)
        return super().facts(summed[split:], known)

    def _round(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        leaf = self._tapped[number]
        return self.rounded(leaf, gradient).to(gradient.dtype)  # only low bits are gone: nothing is rounded again

    def _collect(self) -> list[torch.Tensor | None]:
        gradients = [leaf.parameter.grad for leaf in self.leaves]
        found = [None if gradient is None else local(gradient) for gradient in gradients]
        if any(one.sums for one in self.kin):  # tp: not exact between layouts anyway
            sum_over_kin(given(self.leaves, self.kin), [one for one in self.kin if one.sums])
            found = [None if (g := leaf.parameter.grad) is None else local(g) for leaf in self.leaves]
        return found

    def drop(self) -> None:
        """Forget all gradients, those of twins too."""
        super().drop()
        for twin in self._twins:
            twin.grad = None
