"""Llama: rotary positions, RMSNorm before each branch, SwiGLU, grouped-query attention, no biases.

Shapes in comments: b microbatch, s sequence, d d_model, h query heads, k key and value heads, c head_dim, f d_ff,
v vocabulary.

    tokens -> embedding -> blocks -> norm -> head -> logits
    block:  x = x + dropout(attention(norm1(x)));  x = x + dropout(feed_forward(norm2(x)))

Touvron et al., arXiv 2302.13971, section 2.2; grouped queries: Ainslie et al., arXiv 2305.13245; rotary: Su et al.,
arXiv 2104.09864, in the layout of the published weights (the two numbers of a pair are c/2 apart).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.spec.shape import DecoderShape


def rotation(seq_len: int, head_dim: int, theta: float, like: Tensor) -> Tensor:
    """Cosine and sine of every pair's angle at every place, in the dtype and on the device of `like`.

    Pair i of a head turns by place * theta ** (-2 i / head_dim). The angles are fp64: in fp32 those of far places are
    already wrong by more than bf16 can show. They are computed and not kept: a buffer would follow the module's
    `.to(dtype)` and be an fp32 value in an fp64 model.

    Returns:
        (2, s, c): what x[i] and what its partner, c/2 away, is multiplied by before the two are added; see `rotate`.
    """
    pair = torch.arange(0, head_dim, 2, dtype=torch.float64, device=like.device)  # (c/2,)
    place = torch.arange(seq_len, dtype=torch.float64, device=like.device)  # (s,)
    angle = torch.outer(place, theta ** (-pair / head_dim))  # (s, c/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))).to(like.dtype)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + c/2]) of each head by its angle. x and result: (b, h, s, c); turn: (2, s, c).

    (x, y) becomes (x cos - y sin, y cos + x sin); rolling by c/2 puts every number in the place of its partner.
    """
    mine, partner = turn.unbind()  # (s, c) each
    return x * mine + x.roll(x.size(-1) // 2, dims=-1) * partner


@final
class Attention(nn.Module):
    """Causal self-attention in which h / k query heads share one key and value head.

    Heads are counted from the width of the projections, so a slice of whole heads works too.
    """

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        d, queries, keys = shape.d_model, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.dropout = shape.dropout
        self.query = nn.Linear(d, queries, bias=False)
        self.key = nn.Linear(d, keys, bias=False)
        self.value = nn.Linear(d, keys, bias=False)
        self.out = nn.Linear(queries, d, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Each place looks at itself and what came before. x and result: (b, s, d); turn: (2, s, c)."""
        q = rotate(self._heads(self.query(x)), turn)  # (b, h, s, c)
        k = rotate(self._heads(self.key(x)), turn)  # (b, k, s, c)
        v = self._heads(self.value(x))  # (b, k, s, c)
        p, grouped = self.dropout if self.training else 0.0, q.size(1) != k.size(1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=grouped)  # (b, h, s, c)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))  # (b, s, h c) -> (b, s, d)
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), -1, self.head_dim).transpose(1, 2)  # (b, s, h c) -> (b, h, s, c)


@final
class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202): one matrix proposes, another gates, a third brings the width back."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.d_model, shape.d_ff, bias=False)
        self.up = nn.Linear(shape.d_model, shape.d_ff, bias=False)
        self.down = nn.Linear(shape.d_ff, shape.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (b, s, d) to (b, s, d)."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))  # (b, s, f) inside
        return out


@final
class Block(nn.Module):
    """Two branches, each added to the residual stream."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.norm2 = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
        self.feed_forward = FeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Map x (b, s, d) to (b, s, d); turn (2, s, c) comes from `rotation`."""
        x = x + self.dropout(self.attention(self.norm1(x), turn))
        x = x + self.dropout(self.feed_forward(self.norm2(x)))
        return x


@final
class Llama(nn.Module):
    """The whole model: token ids in, logits over the vocabulary out."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
        self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Give the head the embedding's weight, if the shape says so. Needed again after `to_empty`, which unties."""
        if self.shape.tied_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (b, s) int64. Result: (b, s, v) logits; those at place i foretell the token at i + 1."""
        return self.end(self.through(self.begin(tokens), self.blocks, tokens.size(1)))

    def begin(self, tokens: Tensor) -> Tensor:
        """What comes before the blocks: tokens (b, s) -> (b, s, d)."""
        x: Tensor = self.embedding(tokens)
        return x

    def through(self, x: Tensor, blocks: Iterable[nn.Module], seq_len: int) -> Tensor:
        """Some of the blocks: x and result (b, s, d), where s may be a part of the sequence of `seq_len` places."""
        turn = rotation(seq_len, self.shape.head_dim, self.shape.rope_theta, like=x)  # (2, seq_len, c)
        for block in blocks:
            x = block(x, turn)
        return x

    def end(self, x: Tensor) -> Tensor:
        """What comes after the blocks: x (b, s, d) -> logits (b, s, v)."""
        logits: Tensor = self.head(self.norm(x))
        return logits
