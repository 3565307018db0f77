"""FamilyConfig: a config.json with its family's defaults filled in, each value of the right type and within limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from meshwright.errors import Fault, SpecError
from meshwright.spec.family_defaults import DEFAULTS, SPELLINGS
from meshwright.spec.keys import Key
from meshwright.spec.nearest import shown
from meshwright.spec.values import value_fault

_FLAGS: Final = frozenset(
    {
        "add_cross_attention", "attention_bias", "bias", "mlp_bias", "multi_query", "new_decoder_architecture",
        "parallel_attn", "qk_layernorm", "qkv_bias", "tie_word_embeddings", "use_bias", "use_parallel_residual",
        "use_sliding_window",
    }
)  # fmt: skip
_RATES: Final = frozenset({"hidden_dropout", "resid_pdrop", "residual_dropout"})
_CAPS: Final = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
_LISTS: Final = frozenset({"layer_types", "mlp_only_layers", "no_rope_layers"})
_FROM_ZERO: Final = frozenset(
    {
        "first_k_dense_replace", "max_window_layers", "n_shared_experts", "shared_expert_intermediate_size",
        "sliding_window",
    }
)  # fmt: skip
"""Sizes of which 0 says that there is none."""

_NULL_IS_A_VALUE: Final = _CAPS | {
    "head_dim",
    "n_shared_experts",
    "num_key_value_heads",
    "q_lora_rank",
    "sliding_window",
}
"""Keys of which null says something; of any other it is the same as leaving it out."""

_MOST_LAYERS: Final = 10_000
"""A file says one thing or another of each layer; the deepest published decoders have some hundred."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyConfig:
    """What decides the shape, complete.

    Attributes:
        name: of the model, as the user knows it.
        family: a key of `DEFAULTS`.
        values: by the keys of the family's defaults.
        spelt: those keys as the file spells them.
    """

    name: str
    family: str
    values: Mapping[str, Any]
    spelt: Mapping[str, str]

    def size(self, key: str) -> int:
        """A whole number that must be there.

        Raises:
            SpecError: it is left out, and the family has no default for it.
        """
        value = self.values[key]
        if value is None:
            raise SpecError(self.where(key), "is left out, and this family has no default for it.")
        return int(value)

    def size_or_none(self, key: str) -> int | None:
        """A whole number, or None; also None where the family has no such key."""
        value = self.values.get(key)
        return None if value is None else int(value)

    def flag(self, key: str) -> bool:
        """A switch; off where the family has no such key."""
        return bool(self.values.get(key, False))

    def rate(self, key: str) -> float:
        """A probability."""
        return float(self.values[key])

    def entries(self, key: str) -> list[Any] | None:
        """A list, or None; also None where the family has no such key."""
        value = self.values.get(key)
        return None if value is None else list(value)

    def spelling(self, key: str) -> str:
        """A key as the file spells it."""
        return self.spelt.get(key, key)

    def where(self, key: str) -> str:
        """What an error says of the place of a key."""
        return f"{self.name}: {self.spelling(key)}"


def family_config(raw: Mapping[str, Any], family: str, name: str) -> FamilyConfig:
    """Fill in what a config.json leaves out.

    Args:
        raw: the file.
        family: a key of `DEFAULTS`.
        name: of the model, for errors.

    Raises:
        SpecError: values of a wrong type or beyond their limits; carries one fault for each.
    """
    own = {other: key for other, key in SPELLINGS.get(family, {}).items() if other in raw}
    spelt = {key: other for other, key in own.items()}
    values = {key: _value(raw, spelt.get(key, key), key, default) for key, default in DEFAULTS[family].items()}
    found = FamilyConfig(name=name, family=family, values=values, spelt=spelt)
    faults = [fault for key in values if (fault := _fault(found, key))]
    if len(faults) == 1:
        raise SpecError(f"{name}: {faults[0].where}", faults[0].rule, faults[0].nearest)
    if faults:
        raise SpecError(name, " ".join(str(fault) for fault in faults), faults=faults)
    return found


def _value(raw: Mapping[str, Any], spelling: str, key: str, default: Any) -> Any:
    given = raw.get(spelling, default)
    return default if given is None and key not in _NULL_IS_A_VALUE else given


def _fault(config: FamilyConfig, key: str) -> Fault | None:
    value, where = config.values[key], config.spelling(key)
    if value is None:
        return None
    if key in _LISTS:
        return None if isinstance(value, list) else Fault(where, f"is {shown(value)}; must be a list.")
    if key in _FLAGS:
        return value_fault(where, value, "bool", Key(""))
    if key in _RATES:
        return value_fault(where, value, "float", Key("", least=0, most=1))
    if key in _CAPS:
        return value_fault(where, value, "float", Key("", above=0))
    most = _MOST_LAYERS if key == "num_hidden_layers" else None
    return value_fault(where, value, "int", Key("", least=0 if key in _FROM_ZERO else 1, most=most))
