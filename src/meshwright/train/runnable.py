"""What a recipe may say, and this version does not run: found before a process starts, all at once. No torch.

    tp        whole heads on every rank; sequences that divide; an optimizer that updates each weight by itself
    pp        a layer for every stage; microbatches that the schedule takes; gradients summed when the schedule is over
    pp, ZeRO  zero-bubble schedules need weights that stay gathered
    pp        and do not go with recompute
    exact     sums of not too many microbatches

What only the model can say (it is no chain, it has no table for tp) is refused once it is built.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import Fault, SpecError
from meshwright.parallel.grid import MOST_MICROBATCHES
from meshwright.spec.batch import plan_batch
from meshwright.spec.layout import Layout, chunks_of
from meshwright.spec.nearest import divisors, listed, shown
from meshwright.spec.optimizers import OPTIMIZERS, is_elementwise
from meshwright.spec.pipeline import SPLIT, microbatch_fault, recompute_fault
from meshwright.spec.recipe import Recipe
from meshwright.spec.tensor_rules import TensorRules, degree_fault, reference_rules, rules_of, sequence_fault


def require_runnable(recipe: Recipe, layout: Layout) -> None:
    """Refuse what is legal by itself, but not run by this version.

    Args:
        recipe: what is to run.
        layout: its layout, resolved.

    Raises:
        SpecError: with every such key, and the nearest that runs.
    """
    faults = list(_faults(recipe, layout))
    if faults:
        raise SpecError("not run by this version", "; ".join(map(str, faults)), faults=faults)


def _faults(recipe: Recipe, layout: Layout) -> Iterator[Fault]:
    if layout.tp > 1:
        yield from _tensor_faults(recipe, layout)
    if layout.pp > 1:
        yield from _pipeline_faults(recipe, layout)
    total = plan_batch(recipe.batch, layout.dp_degree).total_microbatches
    if recipe.train.reduction == "exact" and total > MOST_MICROBATCHES:
        size = -(-recipe.batch.global_batch_size // MOST_MICROBATCHES)
        rule = f"makes {total} microbatches a step; sums of more than {MOST_MICROBATCHES} would not be exact."
        yield Fault("train.reduction = exact", rule, f"Nearest: batch.microbatch_size {size} or more.")
    if recipe.checkpoint.asynchronous:
        yield Fault("checkpoint.asynchronous", "this version saves between steps.", "Nearest: false.")


def _tensor_faults(recipe: Recipe, layout: Layout) -> Iterator[Fault]:
    """Of tp: heads, sequence, optimizer."""
    rules = tensor_rules_of(recipe)
    if rules is not None:
        found = (degree_fault(rules, layout.tp), sequence_fault(rules, recipe.data.seq_len, layout.tp))
        yield from (fault for fault in found if fault is not None)
    if not is_elementwise(recipe.optimizer):
        build = recipe.optimizer.build
        path, asked = ("optimizer.build", build) if build else ("optimizer.name", recipe.optimizer.name)
        whole = ", ".join(name for name, known in OPTIMIZERS.items() if known.elementwise)
        rule = f"is {shown(asked)} with layout.tp {layout.tp}, which leaves each rank a part of every matrix: "
        rule += f"the update must be elementwise by construction ({whole})."
        yield Fault(path, rule, 'Nearest: "adamw", or layout.tp = 1.')


def tensor_rules_of(recipe: Recipe) -> TensorRules | None:
    """How tp cuts a recipe's model, as far as the recipe says it; None where the model itself does."""
    if recipe.layout.tensor is not None:
        return rules_of({pattern: str(style) for pattern, style in recipe.layout.tensor.items()})
    model = recipe.model
    if model.name is None:
        return None
    return reference_rules(model.name, model.n_heads, model.n_kv_heads or model.n_heads)


def _pipeline_faults(recipe: Recipe, layout: Layout) -> Iterator[Fault]:
    """Of pp: stages, microbatches, ZeRO, sync, units."""
    schedule, chunks = recipe.layout.pp_schedule, chunks_of(recipe.layout)
    batch = plan_batch(recipe.batch, layout.dp_degree)
    if recipe.model.name is not None:
        yield from _stage_faults(recipe.model.n_layers, layout.pp, chunks)
    samples = batch.num_microbatches * batch.microbatch_size
    wrong = microbatch_fault(schedule, layout.pp, batch.num_microbatches, samples)
    again = recompute_fault(schedule, recipe.train.recompute)
    yield from (fault for fault in (wrong, again) if fault is not None)
    if schedule in SPLIT and layout.zero_stage == 3:
        rule = f"is {schedule} with layout.zero_stage 3: its backward passes come in two, and weights that are freed "
        yield Fault("layout.pp_schedule", f"{rule}between them give wrong gradients.", f"Nearest: {_unsplit(layout)}.")
    if recipe.train.sync == "every":
        rule = f"is every with layout.pp {layout.pp}; a pipeline sums gradients when its schedule is over."
        yield Fault("train.sync", rule, 'Nearest: "last".')
    if recipe.layout.units is not None:
        rule = f"is {shown(recipe.layout.units)} with layout.pp {layout.pp}; a stage gathers block by block."
        yield Fault("layout.units", rule, "Leave it out.")


def _unsplit(layout: Layout) -> str:
    return f"layout.zero_stage 2 or 1, or pp_schedule 1f1b (from {layout.pp} microbatches up), interleaved1f1b or gpipe"


def _stage_faults(num_layers: int, pp: int, chunks: int) -> Iterator[Fault]:
    """Every stage has a layer."""
    if pp * chunks <= num_layers:
        return
    many = f"pp {pp}{f' x {chunks} chunks' if chunks > 1 else ''} = {pp * chunks} stages"
    most = num_layers // chunks
    near = [f"pp {most}"] if most > 1 else []
    near += ["pp_schedule 1f1b, with 1 chunk"] if chunks > 1 and pp <= num_layers else []
    near += [f"model.n_layers {pp * chunks}"]
    degrees = [degree for degree in divisors(pp) if degree * chunks <= num_layers]
    legal = f"; of the divisors of {pp}: {listed(degrees)}" if degrees else ""
    rule = f"{many}, and the model has {num_layers} layers; each stage has at least one."
    yield Fault("layout.pp", rule, f"Nearest: {listed(near)}{legal}.")
