"""What the operators of a program keep from forward to backward, as data: kernels, and the habits of their modules.

cuda, cpu     the reference models of this package (models/llama.py, models/gpt2.py) on GPUs, and on the CPU
hf            the modules of transformers 5 on GPUs: norms and some activations made of single operators, attention
              fused where a family has it so
eager, torchtitan, megatron, megatron-unfused     programs that published measurements come from
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from meshwright.spec.decoder import DecoderSpec

Norm = Literal["fused", "copied", "wide"]
"""What a norm keeps for its backward pass:

    fused    its input
    copied   an fp32 copy of it, and the normalised numbers in the compute type
    wide     an fp32 copy of it, and the normalised numbers in fp32

and its statistics. Its output is kept by the product that it goes into.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How the modules of one family are written, as far as it costs memory.

    Attributes:
        norm: fused | copied | wide; LayerNorms are fused everywhere.
        offset_norm: a norm's weight is 1 + w, made anew in fp32 for each block (Gemma).
        post_norms: norms stand behind the branches only, so the products read the residual stream itself (OLMo 2).
        eager: attention is made of single operators, so that scores are kept.
        masks: attention gets a mask where a window is shorter than the sequence, and expands keys and values.
        joined: queries, keys and values come from one product, all of which the values keep alive.
        copied_result: attention's result is copied, because cut-up heads came to it in another order.
        plain_parts: parts of width d_ff that a feed-forward without a gate keeps: 2, or 5 with a GELU by single steps.
        expert_parts: parts of width d_ff that an expert keeps.
        wide_router: a router computes in fp32.
        wide_tables: rotary tables are fp32, and each block casts them for itself.
        table_share: of a head, that rotates.
    """

    norm: Norm = "fused"
    offset_norm: bool = False
    post_norms: bool = False
    eager: bool = False
    masks: bool = False
    joined: bool = False
    copied_result: bool = False
    plain_parts: float = 2.0
    expert_parts: float = 4.0
    wide_router: bool = False
    wide_tables: bool = False
    table_share: float = 1.0


_HF: Final = Habits(norm="copied", masks=True)
_GEMMA: Final = Habits(norm="wide", offset_norm=True, masks=True)

TRANSFORMERS: Final[Mapping[str, Habits]] = {
    "deepseek_v2": Habits(norm="copied", wide_router=True),
    "deepseek_v3": Habits(norm="copied", wide_router=True),
    "falcon": Habits(joined=True),
    "gemma": _GEMMA,
    "gemma2": Habits(norm="wide", offset_norm=True, eager=True),
    "gemma3_text": _GEMMA,
    "gpt2": Habits(plain_parts=5.0),
    "gpt_neox": Habits(joined=True, copied_result=True, table_share=0.25),
    "gpt_oss": Habits(norm="wide", eager=True, expert_parts=7.0, table_share=0.5),
    "olmo2": Habits(norm="wide", post_norms=True, wide_tables=True),
    "phi": Habits(copied_result=True, plain_parts=5.0, table_share=0.5),
    "phi3": Habits(norm="copied", masks=True, joined=True, copied_result=True),
}
"""model_type -> how its module is written; all others as Llama is. Read off traces of transformers 5.24."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What the operators of a program keep; a layer's products keep their inputs in any case.

    Attributes:
        name: of the set.
        habits: of its modules, whatever the family.
        by_family: take the habits from `TRANSFORMERS` in place of these.
        on_cpu: statistics and dropout masks are in the compute type, and attention with dropout is not fused.
        parts: so are the masks, and the attention, of dropout under tp (parallel/masks.py).
        score_bytes: per head and pair of places, where attention is not fused: 0 for fused attention.
        activation_parts: parts of width d_ff that a gated feed-forward keeps: 4, or 3 or 2 where kernels are fused.
        loss_kept_bytes: per logit, of logits and cross-entropy, from forward to backward.
        loss_forward_bytes: per logit, at most until backward.
        loss_peak_bytes: per logit, at most in backward.
        capacity: tokens per expert, as a multiple of an even share.
    """

    name: str
    habits: Habits = field(default_factory=Habits)
    by_family: bool = False
    on_cpu: bool = False
    parts: bool = False
    score_bytes: float = 0.0
    activation_parts: float = 4.0
    loss_kept_bytes: float = 4.0
    loss_forward_bytes: float = 8.0
    loss_peak_bytes: float = 12.0
    capacity: float = 1.0

    def habits_of(self, decoder: DecoderSpec) -> Habits:
        """How the modules of this decoder are written."""
        return TRANSFORMERS.get(decoder.family, _HF) if self.by_family else self.habits

    def mask_bytes(self, compute_bytes: int) -> int:
        """Of one number of a dropout mask."""
        return compute_bytes if self.on_cpu or self.parts else 1

    def statistic_bytes(self, compute_bytes: int, norm: str) -> int:
        """Of one mean, or one 1/std."""
        return compute_bytes if self.on_cpu and norm == "layer" else max(compute_bytes, 4)


KERNELS: Final[Mapping[str, Kernels]] = {
    "cuda": Kernels(name="cuda"),
    "cpu": Kernels(name="cpu", on_cpu=True, habits=Habits(norm="wide")),
    "hf": Kernels(name="hf", by_family=True),
    "eager": Kernels(name="eager", score_bytes=5.0),
    "torchtitan": Kernels(name="torchtitan", loss_forward_bytes=10.0),
    "megatron": Kernels(name="megatron", loss_forward_bytes=6.0, loss_peak_bytes=6.0),
    "megatron-unfused": Kernels(name="megatron-unfused", score_bytes=5.0, loss_forward_bytes=6.0, loss_peak_bytes=6.0),
}
"""Cross-entropy is eager and in fp32 (12 bytes a logit at its peak) where nothing else is said."""
