"""Byte recipes: how many bytes of parameters, gradients and optimizer state one parameter costs, and what ZeRO cuts.

One memory model, several conventions, each named where it is used:

    textbook    2 + 2 + 8      16-bit weights and gradients, fp32 moments, no master copy
    zero-paper  2 + 2 + 12     as the ZeRO paper counts: an fp32 master copy besides
    fsdp2       4 + 4 + 8      what meshwright runs: fp32 masters; 16-bit copies are gathered while they compute
    megatron    2 + 4 + 12     16-bit weights, fp32 main gradients, fp32 masters and moments

In a paper's recipe a stage cuts what its name says: 1 the optimizer state, 2 + gradients, 3 + parameters. FSDP2 cuts
the masters at every stage, and what a stage leaves whole is the gathered copy, which lives from the first forward pass
of a step to its last backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from meshwright.errors import SpecError
from meshwright.spec.nearest import closest, listed
from meshwright.spec.recipe import Recipe
from meshwright.spec.sections import OptimizerSection

Cuts = Literal["paper", "fsdp2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRecipe:
    """Bytes per parameter of what lives from step to step.

    Attributes:
        name: of the recipe.
        parameter_bytes: of the weights that the optimizer or, without masters, the model itself has.
        gradient_bytes: of a gradient that waits for the optimizer.
        optimizer_bytes: of moments, and of masters where they are not the parameters themselves.
        cuts: what a ZeRO stage cuts, see above.
        frozen_bytes: of a parameter that is not trained; it has neither gradient nor optimizer state.
        source: where the numbers come from.
    """

    name: str
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    cuts: Cuts
    frozen_bytes: float
    source: str

    @property
    def total_bytes(self) -> float:
        """Of one trained parameter, nothing cut."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def _recipe(name: str, p: float, g: float, o: float, source: str, cuts: Cuts = "paper") -> StateRecipe:
    return StateRecipe(
        name=name,
        parameter_bytes=p,
        gradient_bytes=g,
        optimizer_bytes=o,
        cuts=cuts,
        frozen_bytes=p,
        source=source,
    )


_ZERO = "Rajbhandari et al., arXiv 1910.02054, section 3.1"
_OURS = "FSDP2 with MixedPrecisionPolicy; measured in tests/train/test_measured_memory.py"

STATES: Final[Mapping[str, StateRecipe]] = {
    recipe.name: recipe
    for recipe in (
        _recipe("textbook", 2, 2, 8, "16-bit weights and gradients, two fp32 moments, no master copy"),
        _recipe("zero-paper", 2, 2, 12, _ZERO),
        _recipe("fsdp2", 4, 4, 8, _OURS, "fsdp2"),
        _recipe("fp32", 4, 4, 8, "fp32 weights, gradients and two moments"),
        _recipe("bf16", 2, 2, 4, "weights, gradients and both moments in bf16"),
        _recipe("bf16-fp32-moments", 2, 2, 8, "bf16 weights and gradients, fp32 moments, no master copy"),
        _recipe("megatron", 2, 4, 12, "Megatron-LM, distributed optimizer documentation: 6 + 12/d"),
        _recipe("megatron-fp16", 2, 2, 16, "Megatron-LM, distributed optimizer documentation: 4 + 16/d"),
        _recipe("adam8bit", 4, 4, 2.03, "two 8-bit moments, and an fp32 scale for each block of 256", "fsdp2"),
        _recipe("sgd", 4, 4, 0, "plain SGD keeps nothing", "fsdp2"),
        _recipe("momentum", 4, 4, 4, "one fp32 moment: SGD with momentum, Lion", "fsdp2"),
        _recipe("muon", 4, 4, 4, "one fp32 moment; all parameters are matrices under Muon", "fsdp2"),
    )
}


def find_states(name: str) -> StateRecipe:
    """The byte recipe of that name.

    Raises:
        SpecError: there is none; names the nearest.
    """
    if name in STATES:
        return STATES[name]
    near = closest(name, STATES)
    nearest = f"Nearest: {near}." if near else f"There are {listed(STATES, 'and')}."
    raise SpecError(f"--states {name}", "is no byte recipe.", nearest)


MOMENTS_OF: Final[Mapping[str, float]] = {
    "sgd": 0.0,
    "adam": 2.0,
    "adamw": 2.0,
    "adamax": 2.0,
    "nadam": 2.0,
    "radam": 2.0,
    "adagrad": 1.0,
    "adadelta": 2.0,
    "rmsprop": 1.0,
    "rprop": 2.0,
    "asgd": 1.0,
    "adafactor": 0.01,
    "muon": 1.0,
}
"""Tensors of a parameter's own size that torch.optim's classes keep, with their default options."""


def moments_of(section: OptimizerSection) -> float:
    """How many tensors of a parameter's size the optimizer keeps for it."""
    options, moments = dict(section.options or {}), MOMENTS_OF.get(section.name, 2.0)
    if section.name == "sgd" and options.get("momentum"):
        moments += 1
    if options.get("amsgrad"):
        moments += 1
    if section.name == "rmsprop":
        moments += bool(options.get("momentum")) + bool(options.get("centered"))
    return moments


def states_of(recipe: Recipe) -> StateRecipe:
    """What a run of this recipe holds: masters in fp32 (fp64 for fp64), gradients and moments in the masters' type.

    Exact mode sums gradients in fp64.
    """
    master = 8.0 if recipe.precision.compute == "fp64" else 4.0
    moments = moments_of(recipe.optimizer)
    what = f"{recipe.optimizer.name}: {moments:g} moments of {master:g} bytes"
    base = replace(STATES["fsdp2"], name="fsdp2", source=f"{_OURS}; {what}")
    return replace(
        base,
        parameter_bytes=master,
        gradient_bytes=8.0 if recipe.train.reduction == "exact" else master,
        optimizer_bytes=master * moments,
        frozen_bytes=master,
    )
