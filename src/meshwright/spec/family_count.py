"""A bare number of parameters (`7B`) -> a Llama of that size, to the last parameter. Free of torch."""

from __future__ import annotations

import math
import re
from typing import Final

from meshwright.errors import CatalogError
from meshwright.spec.decoder import Attention, DecoderLayer, DecoderSpec, FeedForward
from meshwright.spec.nearest import shown

_ASPECTS: Final = (
    (6, 128, 4), (6, 256, 8), (6, 512, 8),  # Pythia: Biderman et al., arXiv 2304.01373, and its smaller later models
    (8, 512, 8), (18, 768, 12), (16, 1024, 16),  # Hoffmann et al., arXiv 2203.15556, Table A9
    (12, 768, 12), (24, 1024, 16), (24, 1536, 16), (24, 2048, 16), (32, 2560, 32), (32, 4096, 32), (40, 5120, 40),
    (96, 12288, 96),  # GPT-3: Brown et al., arXiv 2005.14165, Table 2.1; 16 heads where its 24 of 128 make no 2048
    (60, 6656, 52), (80, 8192, 64),  # LLaMA: Touvron et al., arXiv 2302.13971, Table 2
    (16, 2048, 32), (126, 16384, 128),  # Llama 3: Grattafiori et al., arXiv 2407.21783, Table 3, and Llama 3.2 1B
    (40, 6144, 48), (48, 8192, 64), (60, 10240, 80), (80, 12288, 96), (96, 16384, 128), (105, 20480, 128),
    (128, 25600, 160),  # Narayanan et al., arXiv 2104.04473, Table 1
)  # fmt: skip
"""n_layers, d_model, n_heads of published models."""

_WIDENING: Final = 8 / 3
"""d_ff / d_model at which three products hold what two of a plain feed-forward of four times the width do. Shazeer,
arXiv 2002.05202, section 3."""

_VOCAB: Final = 32_000  # of Llama 1 and 2
_MULTIPLE: Final = 64  # of d_ff, so that TP degrees divide it
_UNTIED_FROM: Final = 1_000_000_000
_LEAST: Final = 14_000_000
_MOST: Final = 2_000_000_000_000
_UNITS: Final = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}


def parse_count(text: str) -> int | None:
    """The number that `7B`, `1.3B`, `350M`, `7e9` or `7_000_000_000` is; None for any other text.

    Raises:
        CatalogError: a number, but not a whole one or not within 14 million .. 2 trillion.
    """
    found = re.fullmatch(r"(\d[\d_]{0,30})(?:\.(\d{1,30}))?(?:e\+?(\d{1,2}))?\s*([kmbt]?)", text.strip().lower())
    if not found:
        return None
    whole, part, power, unit = found.groups(default="")
    digits = int(whole.replace("_", "") + part)
    shift = int(power or 0) + _UNITS[unit] - len(part)
    count, rest = divmod(digits * int(10 ** max(shift, 0)), int(10 ** max(-shift, 0)))
    if rest:
        raise CatalogError(f"model {shown(text)}", "is no whole number of parameters.", f"Nearest: {count}.")
    if not _LEAST <= count <= _MOST:
        rule = f"is {count:,} parameters; shapes are known for 14M to 2T."
        near = f"Nearest: {'14M' if count < _LEAST else '2T'}." + (
            f" Or was {count}B meant?" if 0 < count < 2000 else ""
        )
        raise CatalogError(f"model {shown(text)}", rule, near)
    return count


def decoder_of_count(count: int, name: str) -> DecoderSpec:
    """A Llama with exactly `count` parameters, of the published aspect ratio that needs the least bending.

    Depth, width and heads are a row of the table; d_ff takes up the rest, down to a multiple of 64; what is left is
    `spare_parameters`. The number is exact, the shape a guess: confidence is low.

    Args:
        count: parameters, 14 million to 2 trillion.
        name: as the user knows it.
    """
    tied = count < _UNTIED_FROM
    _, n_layers, d_model, n_heads, d_ff = min(
        (_bending(d_ff, aspect[1]), *aspect, d_ff) for aspect in _ASPECTS if (d_ff := _d_ff(count, aspect, tied))
    )
    shape = _llama(name, (n_layers, d_model, n_heads), d_ff, tied, 0)
    return _llama(name, (n_layers, d_model, n_heads), d_ff, tied, count - shape.num_parameters)


def _d_ff(count: int, aspect: tuple[int, int, int], tied: bool) -> int:
    """The widest feed-forward with which a model of this aspect has at most `count` parameters; 0 for none."""
    one, two = (_llama("", aspect, width, tied, 0).num_parameters for width in (_MULTIPLE, 2 * _MULTIPLE))
    return max(0, (count - one) // (two - one) + 1) * _MULTIPLE


def _bending(d_ff: int, d_model: int) -> float:
    return abs(math.log(d_ff / d_model / _WIDENING))


def _llama(name: str, aspect: tuple[int, int, int], d_ff: int, tied: bool, spare: int) -> DecoderSpec:
    n_layers, d_model, n_heads = aspect
    width = d_model // n_heads
    heads = Attention(n_heads=n_heads, n_kv_heads=n_heads, head_dim=width, value_dim=width)
    return DecoderSpec(
        name=name,
        family="llama",
        d_model=d_model,
        vocab_size=_VOCAB,
        layers=(DecoderLayer(count=n_layers, attention=heads, feed_forward=FeedForward(gated=True, d_ff=d_ff)),),
        tied_embeddings=tied,
        spare_parameters=spare,
        confidence="low",
        source="a number of parameters alone: a Llama of a published aspect ratio is assumed",
    )
