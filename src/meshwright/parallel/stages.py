"""Which part of a model this rank's stages of a pipeline have; the rest is left out, and no name changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.nn as nn

from meshwright.errors import SpecError
from meshwright.models.anatomy import bare_name, batch_norms, parameters_in_order
from meshwright.models.chain import Chain, Section, chain_of
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.twins import tied_places
from meshwright.spec.stage_cut import cut_stages, stages_of, weigh


@dataclass(frozen=True, slots=True)
class Staged:
    """A model that has been left its own stages.

    Attributes:
        sections: this rank's, by number of the stage, in order.
        num_stages: of the whole pipeline.
        owners: for each parameter's and buffer's name the pp rank that has it.
    """

    sections: Mapping[int, Section]
    num_stages: int
    owners: Mapping[str, int]


def keep_stages(model: nn.Module, mesh: Mesh, schedule: str, chunks: int) -> Staged:
    """Leave out of a model, in place, what other pp ranks have.

    Args:
        model: whole, bare; embedding and head are tied no more (see twins.py).
        mesh: this rank.
        schedule: of the pipeline, for which rank has which stages.
        chunks: stages of a rank.

    Raises:
        SpecError: the model is no chain, ties parameters of blocks, or has fewer blocks than the pipeline has stages.
    """
    chain, pp = chain_of(model), mesh.layout.pp
    if (tied := tied_places(model)) != []:
        raise SpecError(
            f"layout.pp = {pp}",
            f"{tied[0][0].name} and {tied[0][1].name} are one parameter, inside of blocks that stages would part.",
            "Nearest: layout.pp = 1.",
        )
    _require_covered(model, chain)
    num_stages = pp * chunks
    spans = cut_stages(*_costs(model, chain), num_stages)
    ranks = {stage: rank for rank in range(pp) for stage in stages_of(rank, pp, chunks, schedule)}
    owners = _owners(model, chain, spans, ranks)
    sections = {}
    for stage in sorted(stage for stage, rank in ranks.items() if rank == mesh.pp_rank):
        blocks = dict(chain.blocks[i] for i in spans[stage])
        sections[stage] = Section(model, blocks, stage == 0, stage == num_stages - 1, chain)
    _leave_out(model, chain, sections)
    return Staged(sections, num_stages, owners)


def _require_covered(model: nn.Module, chain: Chain) -> None:
    """Refuse what no stage would run as one process does.

    Raises:
        SpecError: a parameter is outside of the chain, or a batch norm takes statistics of what only fills a step up.
    """
    asked = f"a pipeline of {type(model).__name__}"
    parts = (*chain.begin, *(name for name, _ in chain.blocks), *chain.end)
    for name, _ in parameters_in_order(model):
        if not name.startswith(tuple(f"{part}." for part in parts)):
            rule = f"its parameter {name} is in none of the modules before, in and after the blocks."
            raise SpecError(asked, rule, "Nearest: hold it in a module beside the list of blocks, or layout.pp = 1.")
    norms = batch_norms(model)
    if norms:
        rule = f"its batch norm {norms[0]} would count rows that only fill a step up."
        raise SpecError(asked, rule, "Nearest: GroupNorm or LayerNorm, or layout.pp = 1.")


def _costs(model: nn.Module, chain: Chain) -> tuple[list[float], float, float]:
    """Of each block, of what comes before and of what comes after; what they weigh says spec/stage_cut.py."""
    blocks = [sum(p.numel() for p in block.parameters()) for _, block in chain.blocks]
    products = [p for name in chain.end for p in model.get_submodule(name).parameters() if p.ndim > 1]
    weights = weigh(blocks, 0, sum(p.numel() for p in products), tied=False)
    return list(weights.layers), weights.begin, weights.end


def _owners(model: nn.Module, chain: Chain, spans: Sequence[range], ranks: Mapping[int, int]) -> dict[str, int]:
    """For each name the pp rank; what is in no part of the chain is everywhere, and the first answers for it."""
    prefixes = {name: ranks[stage] for stage, span in enumerate(spans) for name, _ in (chain.blocks[i] for i in span)}
    prefixes |= dict.fromkeys(chain.begin, ranks[0]) | dict.fromkeys(chain.end, ranks[len(spans) - 1])
    owners = {}
    for name in map(bare_name, model.state_dict(keep_vars=True)):
        parts = name.split(".")
        heads = [".".join(parts[:i]) for i in range(1, len(parts))]
        owners[name] = next((prefixes[head] for head in reversed(heads) if head in prefixes), 0)
    return owners


def _leave_out(model: nn.Module, chain: Chain, sections: Mapping[int, Section]) -> None:
    """Take modules out of a model that none of the sections has."""
    kept = {id(module) for section in sections.values() for module in section.modules()}
    lists: dict[str, dict[str, nn.Module]] = {}
    for name, block in chain.blocks:
        parent, _, key = name.rpartition(".")
        lists.setdefault(parent, {})
        if id(block) in kept:
            lists[parent][key] = block
    for name, blocks in lists.items():
        _put(model, name, nn.ModuleDict(blocks))
    for name in (*chain.begin, *chain.end):
        if id(model.get_submodule(name)) not in kept:
            _put(model, name, None)


def _put(model: nn.Module, name: str, module: nn.Module | None) -> None:
    parent, _, key = name.rpartition(".")
    model.get_submodule(parent)._modules[key] = module
