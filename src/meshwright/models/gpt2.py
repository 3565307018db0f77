"""GPT-2: learned positions, LayerNorm before each branch, GELU, biases, a head that shares the embedding's weight.

Shapes in comments: b microbatch, s sequence, d d_model, h heads, c head_dim, f d_ff, v vocabulary.

    tokens -> embedding + positions -> dropout -> blocks -> norm -> head -> logits
    block:  x = x + dropout(attention(norm1(x)));  x = x + dropout(feed_forward(norm2(x)))

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.spec.shape import DecoderShape


@final
class Attention(nn.Module):
    """Causal self-attention.

    Heads are counted from the width of the projections, so a slice of whole heads works too.
    """

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        d = shape.d_model
        self.head_dim = shape.head_dim
        self.dropout = shape.dropout
        self.query = nn.Linear(d, d)
        self.key = nn.Linear(d, d)
        self.value = nn.Linear(d, d)
        self.out = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        """Each place looks at itself and what came before. x and result: (b, s, d)."""
        q = self._heads(self.query(x))  # (b, h, s, c)
        k = self._heads(self.key(x))  # (b, h, s, c)
        v = self._heads(self.value(x))  # (b, h, s, c)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)  # (b, h, s, c)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))  # (b, s, h c) -> (b, s, d)
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), -1, self.head_dim).transpose(1, 2)  # (b, s, h c) -> (b, h, s, c)


@final
class FeedForward(nn.Module):
    """Two matrices with a GELU between, for each place alone."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.d_model, shape.d_ff)
        self.down = nn.Linear(shape.d_ff, shape.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (b, s, d) to (b, s, d)."""
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))  # (b, s, f) inside
        return out


@final
class Block(nn.Module):
    """Two branches, each added to the residual stream."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.d_model, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.d_model, eps=shape.norm_eps)
        self.feed_forward = FeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (b, s, d) to (b, s, d)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.feed_forward(self.norm2(x)))
        return x


@final
class Gpt2(nn.Module):
    """The whole model: token ids in, logits over the vocabulary out."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.positions = nn.Embedding(shape.max_seq_len, shape.d_model)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = nn.LayerNorm(shape.d_model, eps=shape.norm_eps)
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
        places = torch.arange(tokens.size(1), device=tokens.device)  # (s,)
        x: Tensor = self.dropout(self.embedding(tokens) + self.positions(places))
        return x

    def through(self, x: Tensor, blocks: Iterable[nn.Module], seq_len: int) -> Tensor:
        """Some of the blocks: x and result (b, s, d), where s may be a part of the sequence of `seq_len` places."""
        for block in blocks:
            x = block(x)
        return x

    def end(self, x: Tensor) -> Tensor:
        """What comes after the blocks: x (b, s, d) -> logits (b, s, v)."""
        logits: Tensor = self.head(self.norm(x))
        return logits
