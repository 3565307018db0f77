"""A choice written into a recipe that `meshwright train` takes, and what such a recipe still lacks."""

from __future__ import annotations

from dataclasses import replace

from meshwright.cost.candidate import RECOMPUTE, SCHEDULES, Candidate
from meshwright.errors import SpecError
from meshwright.plan.option import Option
from meshwright.spec.cluster import Cluster
from meshwright.spec.decoder import DecoderSpec
from meshwright.spec.find_cluster import section_of_cluster
from meshwright.spec.layout import section_of
from meshwright.spec.recipe import Recipe
from meshwright.spec.sections import ModelSection


def planned_recipe(recipe: Recipe, one: Candidate, cluster: Cluster | None = None) -> Recipe:
    """The recipe with its layout, microbatch, recompute, sync and schedule as planned.

    Args:
        recipe: what was planned.
        one: the choice.
        cluster: what it was planned for, to be written down too; None keeps the recipe's.

    Raises:
        SpecError: the choice uses cp, ep or offload, which a recipe cannot say yet.
    """
    planned = [name for name, used in (("cp", one.cp > 1), ("ep", one.ep > 1), ("offload", one.offload > 0)) if used]
    if planned:
        rule = f"uses {', '.join(planned)}, which is planned and which a recipe cannot say yet."
        raise SpecError(f"layout {one.word}", rule, "Name others with --layouts.")
    section = section_of(one.layout, recipe.layout)
    if one.pp > 1:
        chunks = one.chunks if one.chunks > 1 else None
        section = replace(section, pp_schedule=SCHEDULES[one.schedule], pp_chunks=chunks, units=None)
    usual = one.zero_stage >= 2 and one.pp == 1
    sync = None if bool(one.sync_every) == usual or one.num_microbatches == 1 else ("last", "every")[one.sync_every]
    return replace(
        recipe,
        layout=section,
        batch=replace(recipe.batch, microbatch_size=one.microbatch_size),
        train=replace(recipe.train, recompute=RECOMPUTE[one.recompute], sync=sync),
        cluster=section_of_cluster(cluster) if cluster else recipe.cluster,
    )


def reference_section(decoder: DecoderSpec) -> ModelSection | None:
    """The `[model]` of a reference model with exactly this architecture; None if neither of them can be it."""
    if len(decoder.layers) != 1 or decoder.confidence == "low":
        return None
    layer, n_layers = decoder.layers[0], decoder.n_layers
    attention, branch = layer.attention, layer.feed_forward
    gpt2 = decoder.family == "gpt2"
    section = ModelSection(
        name="gpt2" if gpt2 else "llama",
        n_layers=n_layers,
        d_model=decoder.d_model,
        n_heads=attention.n_heads,
        n_kv_heads=None if gpt2 else attention.n_kv_heads,
        head_dim=None if gpt2 else attention.head_dim,
        d_ff=branch.d_ff,
        vocab_size=decoder.vocab_size,
        max_seq_len=decoder.learned_positions if gpt2 else None,
        dropout=decoder.dropout,
        tied_embeddings=decoder.tied_embeddings,
    )
    return section if _same_parameters(section, decoder) else None


def _same_parameters(section: ModelSection, decoder: DecoderSpec) -> bool:
    """Is the reference model the decoder? Its parameters are counted, and what no parameter shows is compared."""
    from meshwright.spec.catalogue import decoder_of_shape
    from meshwright.spec.shape import resolve_shape

    try:
        made = decoder_of_shape(resolve_shape(section, decoder.learned_positions or 1, None))
    except SpecError:
        return False
    return made.layers == decoder.layers and made.num_parameters == decoder.num_parameters and made.norm == decoder.norm


def missing_lines(recipe: Recipe, option: Option, given: frozenset[str]) -> list[str]:
    """What a saved recipe still lacks before it can be trained.

    Args:
        recipe: as saved.
        option: the choice in it.
        given: key paths that the user wrote.
    """
    found = []
    if "optimizer.lr" not in given:
        found.append(f"optimizer.lr = {recipe.optimizer.lr:g} is a placeholder: set yours")
    if "train.steps" not in given:
        found.append(f"train.steps = {recipe.train.steps} is a placeholder: set yours")
    if not any(path.startswith("data.") and path != "data.seq_len" for path in given):
        found.append("data is the Python standard library's source: set data.source, or data.build")
    if recipe.model.hf and not _is_folder(recipe.model.hf):
        found.append(f"model.hf = {recipe.model.hf} is no folder here: name the model's folder or its hub id")
    if not option.runs:
        found.append(f"this version does not run {option.word} yet")
    return found


def _is_folder(path: str) -> bool:
    import os

    return os.path.isdir(path)
