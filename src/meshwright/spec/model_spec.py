"""ModelSpec: what the cost room must know of a model: parameters by part, and the bytes that its passes keep and need.

Two front ends make one: a closed form from a DecoderSpec (cost/closed_form.py, no torch), and a trace of any nn.Module
(models/trace.py, in a child process, through a file). Both are made for one sequence length and one compute type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes on one rank as a linear form in T, the tokens of a microbatch there (microbatch_size * seq_len / cp).

        fixed + T * (inner / tp + residual / (tp with SP, else 1) + normed / (tp if gathered again, else 1))

    Attributes:
        fixed: whatever the microbatch is, such as rotary tables.
        inner: per token, of what TP cuts: heads, hidden units, vocabulary.
        residual: per token, of what sequence parallelism cuts: the residual stream, norms, dropout masks.
        normed: per token, of the norms' outputs, which products cut by TP read whole.
    """

    fixed: float = 0.0
    inner: float = 0.0
    residual: float = 0.0
    normed: float = 0.0

    @property
    def per_token(self) -> float:
        """Bytes per token without TP."""
        return self.inner + self.residual + self.normed

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            fixed=self.fixed + other.fixed,
            inner=self.inner + other.inner,
            residual=self.residual + other.residual,
            normed=self.normed + other.normed,
        )

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(
            fixed=self.fixed - other.fixed,
            inner=self.inner - other.inner,
            residual=self.residual - other.residual,
            normed=self.normed - other.normed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """A repeated block, or a run of equal ones: what ZeRO gathers, recompute cuts by and pipelines deal out.

    Attributes:
        name: of the class, or `layer`.
        count: how many equal ones follow each other.
        parameters: of one.
        frozen: of these, that get no gradient.
        expert: of these, that expert parallelism deals out.
        replicated: of these, that every TP rank has whole (norms, routers, biases of row-parallel products).
        largest: elements of its largest parameter.
        saved: bytes kept from forward to backward by one, by recompute mode (none | selective | full); its input
            counts, its output does not (it is the next one's input).
        forward_peak: the most that lives at once during its forward pass beyond `saved["none"]`.
        transient: the most that lives at once during a forward pass that keeps nothing, its input apart.
        backward_peak: the most that lives at once during its backward pass beyond `saved["none"]` and the gradients of
            its parameters.
        recomputed_peak: by recompute mode (selective | full), the most that lives at once in a backward pass that
            computes the block again, beyond `saved` of that mode.
        parted_kept: where its backward pass comes in two (zero-bubble schedules), kept from the pass of inputs to that
            of weights beyond `saved["none"]`, all of which lives on too: gradients of what has parameters.
        parted_peak: the most that lives at once in the pass of inputs beyond `saved["none"]`.
        draw: the most that lives at once beyond `saved["none"]` where tp draws the dropout mask of all attention heads;
            only what `normed` says of it is of all heads (parallel/masks.py). None without such a draw.
        under_tp: the same block where tp cuts it, if other operators run there (dropout on GPUs); else None.
        matmul_parameters: parameters of matrix products that one token passes (of experts: top_k of them); each costs
            2 FLOP per token forward.
        attention_width: query heads x (query width + value width) / 2; scores cost 4 * width * keys FLOP per token.
    """

    name: str
    count: int
    parameters: int
    frozen: int = 0
    expert: int = 0
    replicated: int = 0
    largest: int = 0
    saved: Mapping[str, Bytes]
    forward_peak: Bytes = field(default_factory=Bytes)
    transient: Bytes = field(default_factory=Bytes)
    backward_peak: Bytes = field(default_factory=Bytes)
    recomputed_peak: Mapping[str, Bytes] = field(default_factory=dict)
    parted_kept: Bytes = field(default_factory=Bytes)
    parted_peak: Bytes = field(default_factory=Bytes)
    draw: Bytes | None = None
    under_tp: UnitSpec | None = None
    matmul_parameters: int = 0
    attention_width: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as the cost room sees it.

    Attributes:
        name: as the user knows it.
        units: its repeated blocks in order, runs of equal ones joined.
        embedding_parameters: of the token embedding (0 for a model without one).
        head_parameters: of the head; 0 where it is tied to the embedding.
        other_parameters: of all that is in no unit and neither of these: final norm, learned positions.
        root_frozen: of the three above, that get no gradient.
        tied: the head uses the embedding's weight.
        buffers: bytes of buffers.
        before: bytes kept by what comes before the first unit (ids, embedding, dropout).
        after: bytes kept by what comes after the last unit up to the logits (final norm).
        loss_kept: bytes kept by logits and loss until backward.
        loss_forward: the most that logits and loss need at once until backward begins.
        loss_peak: the most that they need at once once backward has begun, `loss_kept` included.
        d_model: width of the residual stream.
        vocab_size: width of the logits.
        n_heads: query heads; 0 where unknown (TP is then not offered).
        n_kv_heads: key and value heads.
        n_experts: experts of a layer; 0 for none.
        max_seq_len: longest sequence; None where nothing limits it.
        seq_len: that the byte forms were made for.
        compute: fp32 | bf16 | fp16 | fp64, that the byte forms were made for.
        source: where this came from, for the explanation.
        confidence: exact | low (a bare number of parameters).
        architecture: facts for the explanation and the JSON (`head_dim`, `d_ff`, ...).
    """

    name: str
    units: tuple[UnitSpec, ...]
    embedding_parameters: int = 0
    head_parameters: int = 0
    other_parameters: int = 0
    root_frozen: int = 0
    tied: bool = False
    buffers: int = 0
    before: Bytes = field(default_factory=Bytes)
    after: Bytes = field(default_factory=Bytes)
    loss_kept: Bytes = field(default_factory=Bytes)
    loss_forward: Bytes = field(default_factory=Bytes)
    loss_peak: Bytes = field(default_factory=Bytes)
    d_model: int
    vocab_size: int
    n_heads: int = 0
    n_kv_heads: int = 0
    n_experts: int = 0
    max_seq_len: int | None = None
    seq_len: int
    compute: str
    source: str = ""
    confidence: Literal["exact", "low"] = "exact"
    architecture: Mapping[str, int | float | str | bool | None] = field(default_factory=dict)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied weight counts once."""
        return self.root_parameters + sum(unit.count * unit.parameters for unit in self.units)

    @property
    def root_parameters(self) -> int:
        """Parameters of what is in no unit."""
        return self.embedding_parameters + self.head_parameters + self.other_parameters

    @property
    def frozen_parameters(self) -> int:
        """Parameters that get no gradient."""
        return self.root_frozen + sum(unit.count * unit.frozen for unit in self.units)

    @property
    def n_layers(self) -> int:
        """Units of all runs."""
        return sum(unit.count for unit in self.units)
