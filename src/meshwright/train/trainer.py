"""Trainer: a Recipe made real on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from meshwright.errors import DataError, SpecError
from meshwright.models.anatomy import batch_norms, parameters_in_order
from meshwright.models.build import adopt, begin_model, build_seed
from meshwright.models.built import Built, fill_whole
from meshwright.models.casting import COMPUTE_DTYPES
from meshwright.models.hf_config import hf_vocab_size
from meshwright.models.resolve import call_build, resolve_callable
from meshwright.parallel.apply import apply
from meshwright.parallel.entry import Parallel
from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.seeding import MicrobatchSeeds
from meshwright.parallel.spread import Spread
from meshwright.spec.batch import lr_factor, plan_batch
from meshwright.spec.layout import chunks_of, resolve
from meshwright.spec.optimizers import is_elementwise, may_fuse
from meshwright.spec.recipe import Recipe
from meshwright.spec.sections import ClusterSection
from meshwright.spec.tensor_rules import TensorRules
from meshwright.train.corpus import load_corpus
from meshwright.train.dataset import DatasetSource
from meshwright.train.foresight import Blueprint
from meshwright.train.loader import Cut, Microbatch, Source, TokenSource
from meshwright.train.loss import LossFunction, token_cross_entropy
from meshwright.train.optimizer import OptimizerFactory, build_optimizer, require_trainable
from meshwright.train.order import SampleOrder, Split
from meshwright.train.replicas import require_equal_weights
from meshwright.train.runnable import require_runnable
from meshwright.train.scaler import LossScaler
from meshwright.train.state import State
from meshwright.train.step import Stepper, StepRules
from meshwright.train.tensor_rules import tensor_rules_of
from meshwright.train.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Python objects in place of what the recipe names; None leaves the recipe its say.

    Attributes:
        model: a function that builds the module, or the module itself.
        data: a map-style data set.
        loss: f(model, batch) -> (sum, count).
        optimizer: from parameter groups to an optimizer.
        collate: from a list of items to a batch.
    """

    model: Callable[[], nn.Module] | nn.Module | None = None
    data: Any = None
    loss: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    collate: Callable[[list[Any]], Any] | None = None


@final
class Trainer:
    """The live twin of a Recipe: model, data, optimizer and step on this rank.

    Args:
        recipe: resolved or not; its layout must fit the world.
        world: the ranks.
        parts: Python objects in place of what the recipe names.
        seer: is shown the model before it has memory.

    Raises:
        SpecError: what the recipe names does not exist or does not fit together.
        DataError: the data cannot be read.
        RankDisagreement: the model's weights are not equal on all ranks.
    """

    def __init__(
        self, recipe: Recipe, world: World, parts: Parts | None = None, seer: Callable[[Blueprint], None] | None = None
    ) -> None:
        self._has_loop = parts is not None  # of its own, which may call the model itself
        self._parts = parts = parts or Parts()
        self.recipe, self.world = recipe, world
        torch.set_num_threads(recipe.train.threads_per_rank)
        self.layout = resolve(recipe.layout, world.world_size)
        require_runnable(recipe, self.layout)
        self.mesh = make_mesh(self.layout, world.rank, world.world_size, world.device, world.timeout_s)
        self.batch = plan_batch(recipe.batch, self.layout.dp_degree)
        self.lr_scaling = lr_factor(recipe.optimizer, recipe.batch)
        self.source, self.about_data, vocab_size = _source(recipe, world, parts)
        self.split = Split(self.source.num_samples, recipe.validation.fraction, recipe.train.seed, recipe.data.shuffle)
        self.order = SampleOrder(
            self.split, self.batch.global_batch_size, recipe.train.seed, recipe.data.shuffle, recipe.data.last_batch
        )
        _require_held_out(recipe, self.split)
        built = _model(recipe, parts, vocab_size)
        built.module.train()
        if seer is not None:
            seer(self._blueprint(built, _loss(recipe, parts)))
        # What is cut gets its memory after the cut, or is moved to the device by FSDP, unit by unit: no device has all.
        cuts = self.layout.world_size > self.layout.dp_replicate
        self._built = built if cuts else fill_whole(built)
        self.model = built.module if cuts else built.module.to(world.device)
        require_trainable(parameters_in_order(self.model))
        self.stepper = self._stepper(parts)

    def _blueprint(self, built: Built, loss: LossFunction) -> Blueprint:
        return Blueprint(
            recipe=self.recipe,
            layout=self.layout,
            device=self.world.device.type,
            model=built.module,
            loss=loss,
            source=self.source,
        )

    def _stepper(self, parts: Parts) -> Stepper:
        recipe, world = self.recipe, self.world
        fill = self._built.fill
        if fill is None:
            require_equal_weights(self.model, self.mesh, "before the first step", whole=True)
        seeds = MicrobatchSeeds(recipe.train.seed)
        seeds.attach(self.model)
        loss, compute = _loss(recipe, parts), recipe.precision.compute
        uses_all = recipe.model.name is not None and parts.model is None and loss is token_cross_entropy
        spread = Spread(
            recompute=recipe.train.recompute,
            compute=compute,
            may_skip_parameters=not uses_all,
            exact=recipe.train.reduction == "exact",
            elementwise=parts.optimizer is None and is_elementwise(recipe.optimizer),
            num_microbatches=self.batch.total_microbatches,
            units=recipe.layout.units.split() if recipe.layout.units else None,
            tensor=self._tensor_rules() if self.layout.tp > 1 else None,
            loss_parallel=loss is token_cross_entropy and not self._has_loop,
            schedule=recipe.layout.pp_schedule,
            chunks=chunks_of(recipe.layout),
            fill=fill,
            entered=world.pulse.enter,
        )
        self._parameter_count = sum(p.numel() for _, p in parameters_in_order(self.model))
        parallel = apply(self.model, self.mesh, spread)
        if fill is not None:
            self.require_equal("before the first step", parallel)
        if parallel.spreading is not None and parallel.spreading.vocabulary is not None:
            loss = partial(token_cross_entropy, part=parallel.spreading.vocabulary)
        # After `apply`: what cuts parameters replaces them, and an optimizer of the old ones would train nothing.
        self.optimizer = build_optimizer(
            recipe.optimizer,
            [(leaf.name, leaf.leaf) for leaf in parallel.gradients.leaves],
            fused=may_fuse(recipe.train),
            lr_factor=self.lr_scaling.factor,
            factory=parts.optimizer,
        )
        rules = StepRules(
            batch=self.batch,
            schedule=recipe.schedule,
            lr=recipe.optimizer.lr * self.lr_scaling.factor,
            steps=recipe.train.steps,
            max_grad_norm=recipe.optimizer.max_grad_norm,
            on_nonfinite=recipe.train.on_nonfinite,
            sync=recipe.train.sync or ("every" if self.layout.zero_stage >= 2 else "last"),
            exact=recipe.train.reduction == "exact",
        )
        return Stepper(
            parallel=parallel,
            mesh=self.mesh,
            loss=loss,
            optimizer=self.optimizer,
            rules=rules,
            seeds=seeds,
            scaler=LossScaler(enabled=compute == "fp16"),
            pulse=world.pulse,
        )

    def _tensor_rules(self) -> TensorRules:
        """How tp cuts the model: by the recipe's table, else by the model's own."""
        return tensor_rules_of(self.model, self.recipe)

    def require_equal(self, when: str, parallel: Parallel | None = None) -> None:
        """Stop if replicas differ; collective.

        Args:
            when: for the message.
            parallel: the model as it is spread, while the stepper is not made yet.
        """
        spreading = (parallel or self.stepper.parallel).spreading
        assert spreading is not None, "apply says where tensors live"
        copies = {name: home.cut.copies for name, home in spreading.homes.homes.items() if home.cut is not None}
        require_equal_weights(self.model, self.mesh, when, copies)

    @property
    def has_own_optimizer(self) -> bool:
        """Is the optimizer none of the table's?"""
        return self._parts.optimizer is not None or self.recipe.optimizer.build is not None

    @property
    def state(self) -> State:
        """What a checkpoint saves and loads."""
        spreading = self.stepper.parallel.spreading
        assert spreading is not None, "apply says where tensors live"
        return State(self.model, self.optimizer, self.stepper.gradients.leaves, spreading)

    def stream(self, first_step: int, end_step: int) -> Iterator[Microbatch]:
        """This rank's microbatches of the steps in range(first_step, end_step), loaded ahead."""
        cut = Cut(self.order, self.batch, self.mesh.dp_rank)
        return self.source.stream(cut.places(first_step, end_step))

    def lines(self) -> list[str]:
        """What the user should know before the first step."""
        count = self._parameter_count
        name = self.recipe.model.name or type(self.model).__name__
        batch, ranks = self.batch, self.layout.dp_degree
        lines = [
            f"model: {name}, {count:,} parameters, {self.recipe.precision.compute} on {self.world.device.type}",
            f"data: {self.about_data}" if self.about_data else "",
            self.order.sentence(),
            f"batch: {batch.global_batch_size} samples a step = {_counted(ranks, 'rank')} x "
            f"{_counted(batch.num_microbatches, 'microbatch', 'es')} x {batch.microbatch_size} samples "
            f"({self.layout.word})",
            self.lr_scaling.line,
            *self._built.lines,
            *self.stepper.parallel.notes,
        ]
        return [line for line in lines if line]

    def warnings(self) -> list[str]:
        """What the user should know because it is not what one process with one big batch would do."""
        cluster = (
            [] if self.recipe.cluster == ClusterSection() else ["[cluster] is for planning; a run takes this machine"]
        )
        told = [*cluster, *self._built.warnings]
        if self.layout.tp > 1 and self.recipe.train.reduction == "exact":
            told.append(
                f"exact mode with tp {self.layout.tp}: tp cuts inside matrix products, so the weights are the same "
                "from run to run, and equal to those of one process up to rounding, not to the bit"
            )
        norms = batch_norms(self.model)
        if not norms or self.batch.total_microbatches == 1:
            return told
        return [
            *told,
            f"{len(norms)} batch norm layers ({norms[0]}, ...) take their statistics from each microbatch of "
            f"{self.batch.microbatch_size} samples, not from the global batch of {self.batch.global_batch_size}; "
            "accumulation does not change that. Running statistics are averaged over ranks before they are used or "
            "saved. GroupNorm or LayerNorm has no such effect.",
        ]


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


def _source(recipe: Recipe, world: World, parts: Parts) -> tuple[Source, str, int | None]:
    """The rows, one phrase about them, and the tokenizer's vocabulary if there is one."""
    data, pin = recipe.data, world.device.type == "cuda"
    if parts.data is None and data.build is None:
        known = hf_vocab_size(recipe.model.hf) if recipe.model.hf and parts.model is None else recipe.model.vocab_size
        corpus = load_corpus(data, known)
        return TokenSource(corpus, pin=pin), corpus.about, corpus.vocab_size
    dataset = parts.data
    if dataset is None:
        assert data.build is not None
        seed = build_seed(recipe.train.seed, "data.build")
        function = resolve_callable(data.build, "data.build")
        dataset = call_build(function, dict(data.arguments), spec=data.build, key="data.build", seed=seed)
    workers = 1 if data.workers is None else data.workers
    return DatasetSource(dataset, recipe.train.seed, workers, pin, parts.collate), "", None


def _require_held_out(recipe: Recipe, split: Split) -> None:
    if recipe.validation.fraction and not split.num_held_out:
        raise DataError(
            f"validation.fraction = {recipe.validation.fraction:g}",
            f"holds out {split.num_samples} x {recipe.validation.fraction:g} = 0 whole samples.",
            f"Nearest that works: {1 / split.num_samples:.3g}.",
        )


def _model(recipe: Recipe, parts: Parts, vocab_size: int | None) -> Built:
    dtype = COMPUTE_DTYPES["fp64" if recipe.precision.compute == "fp64" else "fp32"]
    if parts.model is None:
        built = begin_model(
            recipe.model, seq_len=recipe.data.seq_len, tokenizer_vocab=vocab_size, seed=recipe.train.seed, dtype=dtype
        )
    else:
        made = parts.model
        if not isinstance(made, nn.Module):
            seed = build_seed(recipe.train.seed, "model.build")
            made = call_build(made, {}, spec=getattr(made, "__qualname__", repr(made)), key="model", seed=seed)
        built = Built(adopt(made, "the model", dtype))
    _require_bare(built.module)
    return built


def _require_bare(model: nn.Module) -> None:
    """Refuse a module that something else has spread already; take a compiled one apart by name later."""
    for kind, name in (
        (DistributedDataParallel, "DistributedDataParallel"),
        (FullyShardedDataParallel, "FullyShardedDataParallel"),
        (DataParallel, "DataParallel"),
        (FSDPModule, "fully_shard"),
    ):
        if any(isinstance(module, kind) for module in model.modules()):
            raise SpecError(
                "the model",
                f"is wrapped by {name} already.",
                "Give the bare module: meshwright spreads it by [layout].",
            )


def _loss(recipe: Recipe, parts: Parts) -> LossFunction:
    if parts.loss is not None:
        return parts.loss
    if recipe.loss.build is not None:
        return resolve_callable(recipe.loss.build, "loss.build")
    return token_cross_entropy
