"""The batch identity, and how the learning rate follows the batch.

The identity, for whole numbers:

    global_batch_size = dp_degree * num_microbatches * microbatch_size
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import BatchError
from meshwright.spec.nearest import around, divisors, listed, multiples_around
from meshwright.spec.sections import BatchSection, OptimizerSection

LARGEST_DEFAULT_MICROBATCH = 8


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How the samples of one optimizer step are cut into microbatches and dealt to data-parallel ranks.

    Attributes:
        global_batch_size: samples per optimizer step, over all ranks.
        microbatch_size: samples per forward pass on one rank.
        dp_degree: data-parallel ranks.

    Raises:
        BatchError: a number below 1, or no whole number of microbatches per rank; the message lists what works.
    """

    global_batch_size: int
    microbatch_size: int
    dp_degree: int

    def __post_init__(self) -> None:
        """Refuse what has no whole solution."""
        for name in ("global_batch_size", "microbatch_size", "dp_degree"):
            if getattr(self, name) < 1:
                raise BatchError(f"batch.{name}", f"is {getattr(self, name)}, must be at least 1.", "Nearest: 1.")
        if self.global_batch_size % (self.dp_degree * self.microbatch_size):
            raise _no_whole_solution(self.global_batch_size, self.microbatch_size, self.dp_degree)

    @property
    def num_microbatches(self) -> int:
        """Microbatches per data-parallel rank and optimizer step."""
        return self.global_batch_size // (self.dp_degree * self.microbatch_size)

    @property
    def grad_accum_steps(self) -> int:
        """Forward and backward passes whose gradients one step adds up: num_microbatches."""
        return self.num_microbatches

    @property
    def total_microbatches(self) -> int:
        """Microbatches per optimizer step over all ranks: global_batch_size / microbatch_size."""
        return self.global_batch_size // self.microbatch_size


def _no_whole_solution(size: int, micro: int, ranks: int) -> BatchError:
    number = f"{size / (ranks * micro):.4g}"
    rule = f"{size} / ({ranks} data-parallel {_ranks(ranks)} x microbatch_size {micro}) = {number}, not a whole number."
    near = []
    if size % ranks == 0:
        near.append(f"microbatch_size {listed(around(micro, divisors(size // ranks)))}")
    if size % micro == 0:
        near.append(f"{listed(around(ranks, divisors(size // micro)))} ranks")
    near.append(f"global_batch_size {listed(multiples_around(size, ranks * micro))}")
    return BatchError("batch.global_batch_size", rule, f"Nearest that work: {'; '.join(near)}.")


def _ranks(number: int) -> str:
    return "rank" if number == 1 else "ranks"


def default_microbatch_size(global_batch_size: int, dp_degree: int) -> int:
    """The largest divisor up to 8 of the samples that one rank gets in a step.

    Raises:
        BatchError: the ranks do not divide the global batch.
    """
    share = BatchPlan(global_batch_size, 1, dp_degree).num_microbatches
    return max(size for size in range(1, LARGEST_DEFAULT_MICROBATCH + 1) if share % size == 0)


def plan_batch(section: BatchSection, dp_degree: int) -> BatchPlan:
    """The batch of a recipe on a number of data-parallel ranks.

    Raises:
        BatchError: no whole number of microbatches per rank.
    """
    micro = section.microbatch_size or default_microbatch_size(section.global_batch_size, dp_degree)
    return BatchPlan(section.global_batch_size, micro, dp_degree)


def microbatches_of_rank(total: int, dp_degree: int, dp_rank: int) -> range:
    """The contiguous block of a step's microbatches that one data-parallel rank takes.

    Sizes differ by at most one, the larger blocks first; a short last batch with total < dp_degree leaves the last
    ranks an empty range.

    Args:
        total: microbatches of the step over all ranks, >= 0.
        dp_degree: data-parallel ranks, >= 1.
        dp_rank: this rank's place among them, 0 .. dp_degree - 1.
    """
    assert total >= 0 and 0 <= dp_rank < dp_degree, f"rank {dp_rank} of {dp_degree} over {total} microbatches"
    size, larger = divmod(total, dp_degree)
    start = dp_rank * size + min(dp_rank, larger)
    return range(start, start + size + (dp_rank < larger))


@dataclass(frozen=True, slots=True)
class LrScaling:
    """What the batch does to the learning rate.

    Attributes:
        factor: `optimizer.lr` is multiplied by this.
        line: the sentence to print, with both batches and both rates; empty if no tuned batch is given.
        source: where the rule comes from; empty if none was applied.
    """

    factor: float
    line: str
    source: str


LINEAR_SOURCE = "Goyal et al. 2017, arXiv 1706.02677, section 2.1"
SQRT_SOURCE = "Krizhevsky 2014, arXiv 1404.5997, section 5; for Adam: Malladi et al. 2022, arXiv 2205.10330"


def lr_factor(section_optimizer: OptimizerSection, section_batch: BatchSection) -> LrScaling:
    """Scale the learning rate by the stated rule when the global batch is not the one it was tuned at.

    With k = global_batch_size / tuned_global_batch_size: none 1, linear k, sqrt k ** 0.5.

    Source: linear: Goyal et al. 2017 (arXiv 1706.02677, section 2.1). sqrt: Krizhevsky 2014 (arXiv 1404.5997,
    section 5), and Malladi et al. 2022 (arXiv 2205.10330) for Adam.
    """
    size, tuned = section_batch.global_batch_size, section_batch.tuned_global_batch_size
    lr, rule = section_optimizer.lr, section_optimizer.lr_scaling
    if tuned is None:
        return LrScaling(1.0, "", "")
    if size == tuned:
        return LrScaling(1.0, f"lr {lr:g} stays: global_batch_size {size} is the batch it was tuned at.", "")
    linear, root = size / tuned, (size / tuned) ** 0.5
    batches = f"tuned at global batch {tuned}, this run has {size}"
    if rule == "none":
        would = f"linear would give {lr * linear:g}, sqrt {lr * root:g}"
        return LrScaling(1.0, f"lr {lr:g} stays (lr_scaling none): {batches}; {would}.", "")
    factor, source = (linear, LINEAR_SOURCE) if rule == "linear" else (root, SQRT_SOURCE)
    line = f"lr {lr:g} -> {lr * factor:g} (lr_scaling {rule}, x{factor:g}): {batches}. Source: {source}."
    return LrScaling(factor, line, source)
