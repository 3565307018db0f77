"""Rules that span keys: one small function each, listed with the keys it reads in one tuple at the end.

A rule is not asked when a key it reads is unsound itself: its answer would be noise beside the first fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshwright.errors import BatchError, Fault
from meshwright.spec.batch import BatchPlan
from meshwright.spec.layout import stage_conflict
from meshwright.spec.nearest import around, divisors, listed, multiples_around, shown
from meshwright.spec.optimizers import OPTIMIZERS, is_elementwise, may_fuse, optimizer_faults
from meshwright.spec.recipe import Recipe
from meshwright.spec.schedule import decay_steps
from meshwright.spec.sections import CHUNKED_SCHEDULES, KEYS_OF_OTHER_MODELS, DataSection
from meshwright.spec.tables import Reading
from meshwright.spec.tensor_rules import style_faults

Rule = Callable[[Recipe, frozenset[str]], Iterator[Fault]]
"""From a recipe and the key paths that its file gives, to what is wrong."""

BYTES_VOCAB = 256
"""Ids of the bytes tokenizer."""


def broken_rules(reading: Reading) -> Iterator[Fault]:
    """The faults of every rule whose keys are sound."""
    for rule, paths in RULES:
        if reading.is_sound(paths):
            yield from rule(reading.recipe, reading.given)


def source_of(data: DataSection) -> str | None:
    """Where rows come from: `source`, else python-stdlib; None with a `build`."""
    return data.source or (None if data.build else "python-stdlib")


def one_model(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """Exactly one of name, hf and build."""
    found = [key for key in ("name", "hf", "build") if f"model.{key}" in given]
    if not found:
        rule = "one of name, hf and build is required; none is given."
        yield Fault("model", rule, 'Such as name = "llama" or name = "gpt2".')
    elif len(found) > 1:
        yield Fault(
            "model", f"{listed(found, 'and')} are given; exactly one of name, hf and build.", f"Keep one: {found[0]}."
        )


def hf_has_its_shape(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """A Hugging Face model's architecture is in its own config.json."""
    if recipe.model.hf and not recipe.model.name:
        for path in sorted(path for path in given if path.startswith("model.")):
            if path not in ("model.name", "model.hf", "model.build"):
                yield Fault(path, "stands beside model.hf, whose architecture is in its config.json.", "Leave it out.")


def keys_of_the_model(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """gpt2 has learned positions and plain attention, llama rotary ones and grouped heads."""
    for key in KEYS_OF_OTHER_MODELS.get(recipe.model.name or "", ()):
        if f"model.{key}" in given:
            other = next(name for name, keys in KEYS_OF_OTHER_MODELS.items() if key not in keys)
            near = f'Leave it out, or name = "{other}".'
            yield Fault(f"model.{key}", f"{recipe.model.name} has no such key; {other} has.", near)


def width_is_whole_heads(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """d_model = n_heads * head_dim, unless llama is given its own head_dim."""
    model = recipe.model
    if model.name and model.head_dim is None and model.d_model % model.n_heads:
        rule = f"{model.n_heads} heads do not divide d_model {model.d_model}"
        rule += f" ({model.d_model} % {model.n_heads} = {model.d_model % model.n_heads})."
        heads = listed(around(model.n_heads, divisors(model.d_model)))
        widths = listed(multiples_around(model.d_model, model.n_heads))
        yield Fault("model.n_heads", rule, f"Nearest: n_heads {heads}; d_model {widths}.")


def query_heads_share_evenly(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """Each key and value head serves the same number of query heads."""
    heads, shared = recipe.model.n_heads, recipe.model.n_kv_heads
    if recipe.model.name == "llama" and shared and heads % shared:
        near = listed(around(shared, divisors(heads)))
        rule = f"{shared} key and value heads do not divide n_heads {heads} ({heads} % {shared} = {heads % shared})."
        yield Fault("model.n_kv_heads", rule, f"Nearest: {near}.")


def rotary_heads_are_even(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """The rotary embedding turns pairs of dimensions."""
    model = recipe.model
    if model.name != "llama" or (model.head_dim is None and model.d_model % model.n_heads):
        return
    width = model.head_dim or model.d_model // model.n_heads
    if width % 2 == 0:
        return
    if model.head_dim:
        rule = f"is {width}; the rotary embedding turns pairs, so it is even."
        yield Fault("model.head_dim", rule, f"Nearest: {listed(multiples_around(width, 2))}.")
    else:
        even = [heads for heads in divisors(model.d_model) if model.d_model // heads % 2 == 0]
        near = f"n_heads {listed(around(model.n_heads, even))}" if even else f"d_model {model.d_model + model.n_heads}"
        rule = f"d_model {model.d_model} / n_heads {model.n_heads} = head_dim {width}; rotary embeddings turn pairs."
        yield Fault("model.n_heads", rule, f"Nearest: {near}.")


def positions_reach(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """gpt2 has a learned vector for each position."""
    reach, needed = recipe.model.max_seq_len, recipe.data.seq_len
    if recipe.model.name == "gpt2" and reach is not None and reach < needed:
        rule = f"is {reach}, below data.seq_len {needed}; every position needs its own vector."
        yield Fault("model.max_seq_len", rule, f"Nearest: {needed}.")


def vocab_holds_bytes(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """The bytes tokenizer has an id for each byte."""
    size, data = recipe.model.vocab_size, recipe.data
    by_bytes = source_of(data) in ("text", "python-stdlib") and data.tokenizer in (None, "bytes")
    if recipe.model.name and size is not None and by_bytes and size < BYTES_VOCAB:
        rule = f"is {size}; the bytes tokenizer has {BYTES_VOCAB} ids."
        yield Fault("model.vocab_size", rule, f"Nearest: {BYTES_VOCAB}.")


def one_source(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """Source or build, not both."""
    if recipe.data.source and recipe.data.build:
        yield Fault("data.source", "is given beside data.build; one of the two.", "Leave out source, or build.")


def path_where_read(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """Files are named for the sources that read files, and for no other."""
    data, source = recipe.data, source_of(recipe.data)
    if source in ("text", "tokens") and data.path is None and data.build is None:
        rule = f'is required with source = "{source}".'
        yield Fault("data.path", rule, "A file, folder or glob." if source == "text" else "A file of token ids.")
    if data.path is not None and data.build:
        yield Fault(
            "data.path", "means nothing beside data.build.", "A keyword argument of yours needs another name: root."
        )
    elif data.path is not None and source == "python-stdlib":
        rule = "means nothing to python-stdlib, which reads the running interpreter's library."
        yield Fault("data.path", rule, 'Nearest: source = "text".')


def tokenizer_where_text(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """Tokens need no tokenizer; text needs no integer type."""
    source = source_of(recipe.data) or "build"
    if recipe.data.tokenizer is not None and source not in ("text", "python-stdlib"):
        rule = f"means nothing to {source}; text and python-stdlib have one."
        yield Fault("data.tokenizer", rule, "Leave it out.")
    if not recipe.data.pack and source == "tokens":
        yield Fault("data.pack", "is false, and a file of ids does not say where its documents end.", "Leave it out.")
    if "data.token_dtype" in given and source != "tokens":
        yield Fault("data.token_dtype", f"means nothing to {source}; tokens has one.", "Leave it out.")


def builds_are_functions(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """`package.module:function`."""
    for name in ("model", "data", "loss", "optimizer"):
        build = getattr(recipe, name).build
        if build is None:
            continue
        module, colon, function = build.partition(":")
        if not colon or not all(part.isidentifier() for part in [*module.split("."), *function.split(".")]):
            head, _, tail = build.replace("/", ".").removesuffix(".py").rpartition(".")
            near = f'Nearest: "{head}:{tail}".' if not colon and head else ""
            yield Fault(f"{name}.build", f"is {shown(build)}; must be package.module:function.", near)


def optimizer_exists(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """Name, options and groups against the table of optimizers; a `build` function checks its own."""
    if recipe.optimizer.build is None:
        yield from optimizer_faults(recipe.optimizer)
    elif "optimizer.name" in given:
        yield Fault("optimizer.build", f"stands beside name = {shown(recipe.optimizer.name)}.", "Keep one of them.")


def muon_takes_matrices(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """torch.optim.Muon refuses a parameter that is not 2-D; both reference models have 1-D norm weights."""
    known = OPTIMIZERS.get(recipe.optimizer.name) if recipe.optimizer.build is None else None
    if recipe.model.name and known and known.only_matrices:
        rule = f"{recipe.optimizer.name} takes 2-D parameters alone; the norms of {recipe.model.name} are 1-D."
        yield Fault("optimizer.name", rule, 'Nearest: "adamw".')


def exact_steps_round_alike(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """An update of a part must be the part of an update of the whole, and round as it."""
    optimizer, train = recipe.optimizer, recipe.train
    if train.reduction != "exact":
        return
    if not is_elementwise(optimizer):
        path, asked = ("optimizer.build", optimizer.build) if optimizer.build else ("optimizer.name", optimizer.name)
        rule = f"is {shown(asked)} with train.reduction exact, which needs updates that are elementwise by construction"
        whole = ", ".join(name for name, known in OPTIMIZERS.items() if known.elementwise)
        yield Fault(path, f"{rule}: {whole}.", 'Nearest: "adamw", or train.reduction = "fast".')
    elif optimizer.options.get("fused") is True and not may_fuse(train):
        rule = f"is true with train.reduction exact and {train.threads_per_rank} threads a rank: "
        rule += "fused kernels round by where a thread's share of a tensor ends."
        yield Fault("optimizer.fused", rule, "Nearest: train.threads_per_rank = 1, or leave it out: false here.")


def optimizer_takes_parts(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """Adafactor factors the moments of whole matrices."""
    known = OPTIMIZERS.get(recipe.optimizer.name) if recipe.optimizer.build is None else None
    if known and not known.cuttable and recipe.layout.dp_shard > 1:
        rule = f"is {shown(recipe.optimizer.name)}, which needs whole matrices, with layout.dp_shard = "
        rule += f"{recipe.layout.dp_shard}: each rank has some rows."
        yield Fault("optimizer.name", rule, 'Nearest: "adamw", or layout.dp_shard = 1 with dp_replicate.')


def scaling_knows_its_base(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """Scaling by a ratio needs both batches."""
    rule_name, tuned = recipe.optimizer.lr_scaling, recipe.batch.tuned_global_batch_size
    if rule_name != "none" and tuned is None:
        size = recipe.batch.global_batch_size
        rule = f'is required with optimizer.lr_scaling = "{rule_name}": the factor is a function of {size} / it.'
        yield Fault("batch.tuned_global_batch_size", rule, "The global batch at which lr was tuned.")


def warmup_ends(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """The warm-up is a part of the training."""
    warmup, steps = recipe.schedule.warmup_steps, recipe.train.steps
    if warmup > steps:
        yield Fault("schedule.warmup_steps", f"is {warmup}, more than train.steps {steps}.", f"Nearest: {steps}.")


def decay_fits(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """Wsd rises, stays and decays within the training; no other schedule has decay_steps."""
    schedule, steps = recipe.schedule, recipe.train.steps
    where = "schedule.decay_steps"
    if schedule.name != "wsd":
        if schedule.decay_steps is not None:
            yield Fault(where, f"means nothing to {schedule.name}; wsd has it.", "Leave it out.")
        return
    decay = decay_steps(schedule, steps)
    if schedule.warmup_steps <= steps < schedule.warmup_steps + decay:
        left = steps - schedule.warmup_steps
        made = "" if schedule.decay_steps is not None else ", a tenth of train.steps"
        rule = f"warmup_steps {schedule.warmup_steps} + decay_steps {decay}{made} = {schedule.warmup_steps + decay}"
        near = (
            f"decay_steps {left}"
            if left
            else f"warmup_steps {steps - decay}"
            if decay <= steps
            else f"train.steps {decay}"
        )
        yield Fault(where, f"{rule}, more than train.steps {steps}.", f"Nearest: {near}.")


def stop_is_reached(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """A run cannot stop after its end."""
    stop, steps = recipe.train.stop_after, recipe.train.steps
    if stop is not None and stop > steps:
        yield Fault("train.stop_after", f"is {stop}, more than train.steps {steps}.", f"Nearest: {steps}.")


def validation_has_samples(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """Nothing is held out at fraction 0."""
    every = recipe.validation.every_steps
    if every is not None and recipe.validation.fraction == 0.0:
        rule = f"is 0.0 with validation.every_steps {every}; nothing is held out to validate on."
        yield Fault("validation.fraction", rule, "Such as 0.1.")


def exact_has_no_loss_scale(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """fp16 needs a loss scale that follows overflows; exact mode's grid cannot."""
    if recipe.precision.compute == "fp16" and recipe.train.reduction == "exact":
        rule = "is fp16 with train.reduction exact; fp16 scales the loss, which exact mode does not offer."
        yield Fault("precision.compute", rule, 'Nearest: "bf16", or train.reduction = "fast".')


def stage_fits_shards(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """zero_stage 0 cuts nothing; the others need ranks to cut over."""
    if recipe.layout.zero_stage is not None:
        broken = stage_conflict(recipe.layout.dp_shard, recipe.layout.zero_stage)
        if broken:
            yield Fault("layout.zero_stage", *broken)


def tensor_styles_exist(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """Every pattern of layout.tensor has a style that tensor parallelism knows."""
    yield from style_faults(recipe.layout.tensor or {})


def chunks_suit_the_schedule(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """Only interleaved schedules hold several chunks of the model on a stage, and zbv holds 2."""
    chunks, schedule = recipe.layout.pp_chunks, recipe.layout.pp_schedule
    where = "layout.pp_chunks"
    if chunks is not None and schedule not in CHUNKED_SCHEDULES:
        rule = f"is {chunks} with layout.pp_schedule {schedule}, which has 1 chunk a stage."
        yield Fault(where, rule, f"Leave it out, or pp_schedule = {listed(CHUNKED_SCHEDULES)}.")
    elif chunks not in (None, 2) and schedule == "zbv":
        yield Fault(where, f"is {chunks} with layout.pp_schedule zbv, which has 2 chunks a stage.", "Nearest: 2.")


def batch_is_whole(recipe: Recipe, given: frozenset[str]) -> Iterator[Fault]:
    """The batch identity, as far as the layout is known: dp_degree is a multiple of dp_shard in any case."""
    ranks = recipe.layout.dp_shard * (recipe.layout.dp_replicate or 1)
    try:
        BatchPlan(recipe.batch.global_batch_size, recipe.batch.microbatch_size or 1, ranks)
    except BatchError as error:
        yield from error.faults


RULES: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (one_model, ("model.name", "model.hf", "model.build")),
    (hf_has_its_shape, ("model.name", "model.hf")),
    (keys_of_the_model, ("model.name",)),
    (width_is_whole_heads, ("model.name", "model.d_model", "model.n_heads", "model.head_dim")),
    (query_heads_share_evenly, ("model.name", "model.n_heads", "model.n_kv_heads")),
    (rotary_heads_are_even, ("model.name", "model.d_model", "model.n_heads", "model.head_dim")),
    (positions_reach, ("model.name", "model.max_seq_len", "data.seq_len")),
    (vocab_holds_bytes, ("model.name", "model.vocab_size", "data.source", "data.build", "data.tokenizer")),
    (one_source, ("data.source", "data.build")),
    (path_where_read, ("data.source", "data.build", "data.path")),
    (tokenizer_where_text, ("data.source", "data.build", "data.tokenizer", "data.token_dtype", "data.pack")),
    (builds_are_functions, ("model.build", "data.build", "loss.build", "optimizer.build")),
    (optimizer_exists, ("optimizer.name", "optimizer.build", "optimizer.groups")),
    (muon_takes_matrices, ("optimizer.name", "model.name")),
    (exact_steps_round_alike, ("train.reduction", "train.threads_per_rank", "optimizer")),
    (optimizer_takes_parts, ("optimizer.name", "layout.dp_shard")),
    (scaling_knows_its_base, ("optimizer.lr_scaling", "batch.global_batch_size", "batch.tuned_global_batch_size")),
    (warmup_ends, ("schedule.warmup_steps", "train.steps")),
    (decay_fits, ("schedule.name", "schedule.warmup_steps", "schedule.decay_steps", "train.steps")),
    (stop_is_reached, ("train.stop_after", "train.steps")),
    (validation_has_samples, ("validation.every_steps", "validation.fraction")),
    (exact_has_no_loss_scale, ("precision.compute", "train.reduction")),
    (stage_fits_shards, ("layout.dp_shard", "layout.zero_stage")),
    (tensor_styles_exist, ("layout.tensor",)),
    (chunks_suit_the_schedule, ("layout.pp_chunks", "layout.pp_schedule")),
    (
        batch_is_whole,
        ("batch.global_batch_size", "batch.microbatch_size", "layout.dp_shard", "layout.dp_replicate"),
    ),
)
