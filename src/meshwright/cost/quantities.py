"""What a rank of one stage holds, counted: parameters, the largest block, the root, bytes kept; columns in and out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, final

import numpy as np

from meshwright.cost.candidate import PARTED, RECOMPUTE, SCHEDULES, V_SHAPED, Candidate, Column, Columns
from meshwright.cost.engine import Engine
from meshwright.cost.stages import (
    Content,
    Form,
    Stage,
    StageTables,
    content,
    form_of,
    in_flight,
    played_in_flight,
    spans_of_ranks,
    weights_of,
)
from meshwright.cost.states import StateRecipe
from meshwright.spec.model_spec import Bytes, ModelSpec, UnitSpec
from meshwright.spec.pipeline import INTERLEAVED, takes

FULL: Final = RECOMPUTE.index("full")
GPIPE: Final = SCHEDULES.index("gpipe")


@dataclass(frozen=True, kw_only=True)  # without slots, for what is computed once
class Job:
    """What is priced, besides the candidates.

    Attributes:
        model: its parameters and bytes, made for the job's sequence length and compute type.
        global_batch_size: samples per optimizer step.
        states: bytes per parameter.
        engine: how the program holds and frees memory.
        capacity_bytes: memory of one device.
    """

    model: ModelSpec
    global_batch_size: int
    states: StateRecipe
    engine: Engine
    capacity_bytes: int

    @property
    def seq_len(self) -> int:
        """Tokens per sample."""
        return self.model.seq_len

    @cached_property
    def tables(self) -> StageTables:
        """What the stages of its model hold, as its program cuts them."""
        return StageTables(self.model, self.engine.cuts_by_cost)


def rows_part(rows: int, tp: Column) -> Column:
    """The rows of the fullest tp rank over an even part of them, >= 1."""
    return -(-rows // tp) * tp / max(rows, 1) if rows else 1.0


@final
class StageQuantities:
    """Counts of one kind of stage, for every candidate. Names as in research: N parameters, Nb block, Nr root."""

    def __init__(self, job: Job, columns: Columns, stage: Stage) -> None:
        self.job, self.columns, self.stage = job, columns, stage
        self.content: Content = content(job.tables.rows(columns, stage))

    @cached_property
    def is_first(self) -> Column:
        """Is it the first rank of the pipeline?"""
        return np.asarray(self.columns.pp) * 0 + (self.stage in ("first", 0)) > 0

    @cached_property
    def is_last(self) -> Column:
        """Is it the last rank of the pipeline?"""
        pp = np.asarray(self.columns.pp)
        return pp - 1 == self.stage if isinstance(self.stage, int) else pp * 0 + (self.stage == "last") > 0

    @cached_property
    def pp_rank(self) -> Column:
        """Which rank of the pipeline this is, counted from 0; of those in the middle the one before the last."""
        pp = np.asarray(self.columns.pp)
        if isinstance(self.stage, int):
            return pp * 0 + self.stage
        return {"first": pp * 0, "middle": np.maximum(pp - 2, 0), "last": pp - 1}[self.stage]

    @cached_property
    def harvests(self) -> Column:
        """Are gradients taken from the parameters after each backward pass of a pipeline?"""
        return (np.asarray(self.columns.pp) > 1) & self.job.engine.harvests

    @cached_property
    def parts_backward(self) -> Column:
        """Do backward passes come in two, inputs first?"""
        return self.harvests & np.isin(self.columns.schedule, PARTED)

    @cached_property
    def tokens(self) -> Column:
        """Tokens of a microbatch on this rank."""
        return self.columns.microbatch_size * (self.job.seq_len / self.columns.cp)

    @cached_property
    def has_first(self) -> Column:
        """1 where this stage has the embedding."""
        return np.where(np.asarray(self.columns.pp) == 1, 1, self.is_first * 1)

    @cached_property
    def has_last(self) -> Column:
        """1 where this stage has the head and the loss: the last one, or the first of a V-shaped schedule."""
        is_v = np.asarray(self.columns.schedule) == V_SHAPED
        is_here = np.where(is_v, self.is_first, self.is_last)
        return np.where(np.asarray(self.columns.pp) == 1, 1, is_here * 1)

    @cached_property
    def root(self) -> Column:
        """Nr: parameters on this rank that are in no block. A tied table is on both ends of a pipeline."""
        model, tp = self.job.model, self.columns.tp
        head = model.embedding_parameters if model.tied else model.head_parameters
        at_head = head * self.has_last * (1 - self.has_first if model.tied else 1)
        tables = (model.embedding_parameters * self.has_first + at_head) / tp * rows_part(model.vocab_size, tp)
        norm = model.other_parameters if model.other_parameters <= 2 * model.d_model else 2 * model.d_model
        return tables + (model.other_parameters - norm) * self.has_first + norm * self.has_last

    @cached_property
    def twin(self) -> Column:
        """Parameters of a tied table's second copy on the rank that has the first too, which no optimizer sees.

        Exact sums round the gradient of each use by itself; the stages of a V have one copy each.
        """
        c, model = self.columns, self.job.model
        apart = (np.asarray(c.pp) > 1) | ((np.asarray(c.zero_stage) > 0) & self.job.engine.exact)
        both = self.has_first * self.has_last * (apart & model.tied & self.job.engine.harvests)
        return model.embedding_parameters / c.tp * rows_part(model.vocab_size, c.tp) * both

    @cached_property
    def blocks(self) -> Column:
        """Parameters of this rank's blocks, experts apart."""
        one = self.content
        cut = (one.parameters - one.expert - one.replicated) / self.columns.tp + one.replicated
        return cut + one.layers * self.uneven

    @cached_property
    def uneven(self) -> Column:
        """Parameters of a layer that the fullest tp rank has beyond an even part: shared heads, and hidden units."""
        model, tp = self.job.model, self.columns.tp
        facts = {name: model.architecture.get(name) for name in ("head_dim", "d_ff", "gated")}
        head_dim, d_ff = (int(facts[name] or 0) for name in ("head_dim", "d_ff"))
        shared = np.maximum(1 - model.n_kv_heads / tp, 0) * 2 * head_dim * model.d_model
        hidden = (-(-d_ff // tp) - d_ff / tp) * model.d_model * (3 if facts["gated"] else 2)
        return np.where(np.asarray(tp) > 1, shared + hidden * (model.n_experts == 0), 0.0)

    @cached_property
    def experts(self) -> Column:
        """Parameters of this rank's experts."""
        return self.content.expert / (self.columns.tp * self.columns.ep)

    @cached_property
    def parameters(self) -> Column:
        """N: all parameters of this rank, before ZeRO."""
        return self.root + self.blocks + self.experts

    @cached_property
    def frozen(self) -> Column:
        """Of N, that are not trained: in each part as large a share as of the whole."""
        model, one = self.job.model, self.content
        of_blocks = one.frozen / np.maximum(one.parameters, 1) * (self.blocks + self.experts)
        return of_blocks + model.root_frozen / max(model.root_parameters, 1) * self.root

    @cached_property
    def block(self) -> Column:
        """Nb: parameters of the largest block on this rank."""
        largest = max(self.job.model.units, key=lambda unit: unit.parameters, default=None)
        if largest is None:
            return 0.0
        tp, ep = self.columns.tp, self.columns.ep
        return (
            (largest.parameters - largest.expert - largest.replicated) / tp
            + largest.replicated
            + largest.expert / (tp * ep)
        )

    @cached_property
    def largest(self) -> Column:
        """Elements of the largest parameter on this rank."""
        model = self.job.model
        of_units = max((unit.largest for unit in model.units), default=0)
        return max(of_units, model.embedding_parameters, model.head_parameters) / self.columns.tp

    @cached_property
    def head(self) -> Column:
        """Parameters of the product that makes the logits, where this stage has it."""
        model = self.job.model
        weight = model.embedding_parameters if model.tied else model.head_parameters
        return weight * self.has_last / self.columns.tp

    @cached_property
    def embedding(self) -> Column:
        """Parameters of the token embedding, where this stage has it."""
        return self.job.model.embedding_parameters * self.has_first / self.columns.tp

    @cached_property
    def shard_group(self) -> Column:
        """D: ranks that ZeRO cuts over; those that share a sample (cp) hold equal weights, so they are among them."""
        cuts = np.asarray(self.columns.zero_stage) > 0
        return np.where(cuts, self.columns.dp_shard * self.columns.cp, 1)

    def cut(self, trained_only: bool = False) -> Column:
        """N / D; experts are cut over those ranks that have the same ones."""
        frozen = self.frozen if trained_only else 0.0
        expert_group = np.maximum(self.shard_group / self.columns.ep, 1)
        return (self.root + self.blocks - frozen) / self.shard_group + self.experts / expert_group

    def bytes_of(self, form: Bytes | Form) -> Column:
        """A linear form for one microbatch on this rank."""
        form = form_of(form) if isinstance(form, Bytes) else form
        residual_cut = self.columns.tp if self.job.engine.sequence_parallel else 1
        return form.at(self.tokens, self.columns.tp, residual_cut, self.normed_cut)

    @cached_property
    def stream(self) -> Column:
        """Bytes of the residual stream of one microbatch: what passes from block to block, and from stage to stage."""
        return self.bytes_of(Bytes(residual=float(self.job.engine.compute_bytes * self.job.model.d_model)))

    @cached_property
    def normed_cut(self) -> Column:
        """What TP cuts of the norms' outputs."""
        return self.columns.tp if self.job.engine.regathers_norms else 1

    @cached_property
    def kept_by_blocks(self) -> Column:
        """Bytes that the stage's blocks keep for one microbatch, in this recompute mode."""
        cut = self.content.saved_under_tp if self._differs else self.content.saved
        forms = [self._by_tp(whole, parts) for whole, parts in zip(self.content.saved, cut, strict=True)]
        return self._in_mode(forms)

    @cached_property
    def parted_kept(self) -> Column:
        """Bytes that the stage's blocks keep from a backward pass of inputs to that of weights, besides the above."""
        return self.bytes_of(self.content.parted)

    def _in_mode(self, by_mode: list[Column]) -> Column:
        """Of three columns, for each candidate that of its recompute mode."""
        return np.choose(self.columns.recompute, np.broadcast_arrays(*by_mode, self.columns.recompute)[:3])

    @cached_property
    def _differs(self) -> bool:
        """Do other operators run where tp cuts the blocks?"""
        return any(unit.under_tp is not None for unit in self.job.model.units)

    def _by_tp(self, whole: Bytes | Form, cut: Bytes | Form) -> Column:
        """Of two forms, the second where tp cuts."""
        if whole is cut:
            return self.bytes_of(whole)
        return np.where(np.asarray(self.columns.tp) > 1, self.bytes_of(cut), self.bytes_of(whole))

    @cached_property
    def kept_by_layer(self) -> Column:
        """Bytes that one of the stage's blocks keeps for one microbatch."""
        return self.kept_by_blocks / np.maximum(self.content.layers, 1)

    @cached_property
    def after_kept(self) -> Column:
        """Bytes kept for one microbatch by what comes after the last block."""
        return self.bytes_of(self.job.model.after) * self.has_last

    @cached_property
    def in_flight(self) -> Column:
        """Microbatches that are kept at once."""
        return self._kept_at_once[0]

    @cached_property
    def waiting(self) -> Column:
        """Of these, as parts of the stage, those whose backward pass of inputs is over, as a forward pass ends."""
        return self._kept_at_once[1]

    @cached_property
    def less_at_the_loss(self) -> Column:
        """How many fewer are kept when the chunk with the head is through: it may have fewer layers than others."""
        return self._kept_at_once[2]

    @cached_property
    def _kept_at_once(self) -> tuple[Column, Column, Column]:
        one, rank = self.columns, self.stage
        if (
            isinstance(one, Candidate)
            and isinstance(rank, int)
            and one.pp > 1
            and SCHEDULES[one.schedule] in INTERLEAVED
        ):
            weighed = weights_of(self.job.model, self.job.engine.cuts_by_cost)
            spans = spans_of_ranks(weighed, one.pp, one.chunks, one.schedule == V_SHAPED)[rank]
            if len(spans) == one.chunks and takes(SCHEDULES[one.schedule], one.pp, one.num_microbatches):
                return played_in_flight(one, rank, [len(span) for span in spans])
        return in_flight(one, rank), self.pp_rank / np.asarray(one.chunks), 0.0

    @cached_property
    def head_in_flight(self) -> Column:
        """Microbatches that the chunk with the head keeps at once: its backward pass follows its forward pass."""
        c = self.columns
        return np.where((np.asarray(c.pp) > 1) & (np.asarray(c.schedule) == GPIPE), c.num_microbatches, 1)

    @cached_property
    def ends_kept(self) -> Column:
        """Bytes kept by what comes before the first block and after the last, for all microbatches in flight."""
        before = self.in_flight * self.bytes_of(self.job.model.before) * self.has_first
        return before + self.head_in_flight * self.after_kept

    def _fullest(self, form_of: Callable[[UnitSpec], Bytes]) -> Column:
        """The largest of one form over the kinds of block, for one microbatch."""
        values = [self._by_tp(form_of(unit), form_of(unit.under_tp or unit)) for unit in self.job.model.units]
        return np.max(np.broadcast_arrays(*values), axis=0) if values else 0.0

    @cached_property
    def _draw(self) -> Column:
        """Where tp draws a mask of all heads, beyond what the block keeps; below 0 where it draws none."""
        units = [unit.under_tp or unit for unit in self.job.model.units]
        values = [self.bytes_of(unit.draw) for unit in units if unit.draw is not None]
        if not values or not self.job.engine.sequence_parallel:
            return -np.inf
        return np.where(np.asarray(self.columns.tp) > 1, np.max(np.broadcast_arrays(*values), axis=0), -np.inf)

    @cached_property
    def _handed_on(self) -> Column:
        """Where a product cut by tp gives its addends to the stream: they, in the order to be sent in, and the sums."""
        engine, is_cut = self.job.engine, np.asarray(self.columns.tp) > 1
        whole = self.stream * (self.columns.tp if engine.sequence_parallel else 1)
        return np.where(is_cut & engine.harvests, (2 + engine.scatter_copies) * whole + self.stream, -np.inf)

    @cached_property
    def forward_peak(self) -> Column:
        """Working room of the block whose forward pass needs most, beyond what it keeps."""
        keeps, frees = self._in_forward, self.transient
        inputs = self._fullest(lambda unit: unit.saved.get("full", Bytes()))
        # What is freed on the way lives beside what has been kept so far, and most of that comes before.
        beyond = np.maximum(frees - np.maximum(self.kept_by_layer - inputs, 0.0), keeps)
        return np.where(np.asarray(self.columns.recompute) == 0, keeps, np.where(frees > 0, beyond, keeps))

    @cached_property
    def _in_forward(self) -> Column:
        """Working room of a forward pass that keeps all that backward needs."""
        peak = self._fullest(lambda unit: unit.forward_peak)
        return np.maximum(np.maximum(peak, self._draw), self._handed_on)

    @cached_property
    def transient(self) -> Column:
        """Room of one block's forward pass that keeps nothing."""
        before_the_draw = self._fullest(lambda unit: unit.saved["none"] - unit.saved.get("full", Bytes()))
        return np.maximum(self._fullest(lambda unit: unit.transient), before_the_draw + self._draw)

    @cached_property
    def working(self) -> Column:
        """Room of the block whose backward pass needs most: what it computes again, and what it needs itself."""
        again = [self._fullest(lambda unit: unit.backward_peak)]
        for mode in RECOMPUTE[1:]:
            again.append(self._working_again(mode))
        return self._in_mode(again)

    def _working_again(self, mode: str) -> Column:
        """The same where the block's forward pass runs once more: in it, or in the backward pass behind it."""

        def more(unit: UnitSpec) -> Bytes:
            return unit.saved["none"] - unit.saved.get(mode, unit.saved["none"])

        peak = self._fullest(lambda unit: unit.recomputed_peak.get(mode, more(unit) + unit.backward_peak))
        # The gradient of its output is there meanwhile.
        return np.maximum(peak, self._fullest(more) + self.stream + np.maximum(self._draw, self._handed_on))

    @cached_property
    def parted_peak(self) -> Column:
        """Room of the block whose backward pass of inputs needs most; not less than what it keeps for its weights."""
        peak = self._fullest(lambda unit: unit.parted_peak)
        return np.maximum(peak, self._fullest(lambda unit: unit.parted_kept))

    def loss(self, what: str) -> Column:
        """Bytes of logits and loss: `loss_kept`, `loss_forward` or `loss_peak`."""
        form: Bytes = getattr(self.job.model, what)
        return self.bytes_of(form) * self.has_last
