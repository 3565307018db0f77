"""DecoderSpec: the architecture of a decoder-only transformer, and its exact number of parameters. Free of torch.

Every published family is this one value with other switches: a list of layers, each with an attention (grouped queries,
or the compressed keys and values of DeepSeek) and a feed-forward (dense, or experts behind a router).

Weights are counted as `transformers` builds them: each parameter once, a tied one too; buffers are no parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from meshwright.errors import SpecError
from meshwright.spec.nearest import around, divisors, listed


def _require(holds: bool, asked: str, rule: str, nearest: str = "") -> None:
    if not holds:
        raise SpecError(asked, rule, nearest)


def _positive(**sizes: int) -> None:
    """Every size is at least 1."""
    for name, size in sizes.items():
        _require(size >= 1, f"{name} = {size}", "must be at least 1.", "Nearest: 1.")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Sizes of one attention.

    Attributes:
        n_heads: query heads.
        n_kv_heads: key and value heads; equal to n_heads with compressed keys and values (MLA).
        head_dim: width of a query or key head; with MLA the sum of its two parts (nope + rope).
        value_dim: width of a value head.
        qkv_bias: the query, key and value products have biases; with MLA the two products that compress.
        out_bias: the output product has a bias.
        qk_norm: none | head (one norm of head_dim each for q and k) | full (of all heads together).
        sinks: one learned number for each query head (gpt-oss).
        window: how far back a place looks; None for all the way.
        q_rank: width of the compressed query (MLA); 0 for none.
        kv_rank: width of the compressed keys and values (MLA); 0 for plain attention.
        rope_dim: width of the rotary part of a key, which all heads share (MLA).

    Raises:
        SpecError: a size below 1, or n_kv_heads does not divide n_heads.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    sinks: bool = False
    window: int | None = None
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0

    def __post_init__(self) -> None:
        heads, kv = self.n_heads, self.n_kv_heads
        _positive(n_heads=heads, n_kv_heads=kv, head_dim=self.head_dim, value_dim=self.value_dim)
        if heads % kv:
            near = f"Nearest that work: n_kv_heads = {listed(around(kv, divisors(heads)))}."
            raise SpecError(f"n_kv_heads = {kv}", f"does not divide n_heads = {heads}.", near)
        if self.kv_rank:
            rule = f"is no part of head_dim = {self.head_dim}."
            _require(0 < self.rope_dim < self.head_dim, f"rope_dim = {self.rope_dim}", rule)

    @property
    def query_width(self) -> int:
        """Numbers of all queries of a token."""
        return self.n_heads * self.head_dim

    @property
    def out_width(self) -> int:
        """Numbers that a token's attention hands to the output product."""
        return self.n_heads * self.value_dim

    def products(self, d_model: int) -> int:
        """Weights of its matrix products."""
        return self._compressing(d_model) + self._heads(d_model) + self.out_width * d_model

    def biases(self, d_model: int) -> int:
        """Numbers that are added to the results of its products."""
        read = self.query_width + self.n_kv_heads * (self.head_dim + self.value_dim)
        if self.kv_rank:
            read = self.q_rank + self.kv_rank + self.rope_dim
        return self.qkv_bias * read + self.out_bias * d_model

    def norms(self, weights: int) -> int:
        """Weights of the norms inside it.

        Args:
            weights: of a norm for each number of its width: 1 (RMSNorm), or 2 (LayerNorm, with its bias).
        """
        queries_and_keys = {
            "none": 0,
            "head": 2 * self.head_dim,
            "full": (self.n_heads + self.n_kv_heads) * self.head_dim,
        }
        return weights * (queries_and_keys[self.qk_norm] + self.q_rank + self.kv_rank)

    def parameters(self, d_model: int, norm_weights: int) -> int:
        """All its parameters."""
        sinks = self.n_heads if self.sinks else 0
        return self.products(d_model) + self.biases(d_model) + self.norms(norm_weights) + sinks

    def replicated(self, d_model: int, norm_weights: int) -> int:
        """Parameters that every TP rank has whole: norms, what compresses, the bias of the output product."""
        out_bias = self.out_bias * d_model
        compressing_bias = self.biases(d_model) - out_bias if self.kv_rank else 0
        return self.norms(norm_weights) + self._compressing(d_model) + compressing_bias + out_bias

    def _compressing(self, d_model: int) -> int:
        """Weights of the products that compress (MLA)."""
        return d_model * (self.q_rank + self.kv_rank + self.rope_dim) if self.kv_rank else 0

    def _heads(self, d_model: int) -> int:
        """Weights of the products whose results are heads. DeepSeek-V2, arXiv 2405.04434, section 2.1, for MLA."""
        if not self.kv_rank:
            return d_model * (self.query_width + self.n_kv_heads * (self.head_dim + self.value_dim))
        from_latent = self.kv_rank * self.n_heads * (self.head_dim - self.rope_dim + self.value_dim)
        return (self.q_rank or d_model) * self.query_width + from_latent


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """Sizes of one feed-forward.

    Attributes:
        gated: three products (gate, up, down) in place of two.
        d_ff: width of the dense feed-forward, or of one expert.
        bias: its products have biases; with experts, those of the routed ones.
        n_experts: experts behind a router; 0 for a dense feed-forward.
        top_k: experts that each token passes.
        d_ff_shared: width of the expert that every token passes; 0 for none.
        shared_gate: the shared expert has a gate of d_model weights (Qwen2-MoE).
        shared_bias: the products of the shared expert have biases.
        router_bias: the router's product has a bias (a buffer, as DeepSeek's, is no bias).

    Raises:
        SpecError: no width, or top_k is not within 1 .. n_experts.
    """

    gated: bool
    d_ff: int
    bias: bool = False
    n_experts: int = 0
    top_k: int = 0
    d_ff_shared: int = 0
    shared_gate: bool = False
    shared_bias: bool = False
    router_bias: bool = False

    def __post_init__(self) -> None:
        _positive(d_ff=self.d_ff)
        if self.n_experts:
            near = f"Nearest: {min(max(self.top_k, 1), self.n_experts)}."
            rule = f"must be within 1 .. n_experts = {self.n_experts}."
            _require(1 <= self.top_k <= self.n_experts, f"top_k = {self.top_k}", rule, near)

    def parameters(self, d_model: int) -> int:
        """All its parameters."""
        return self._beside(d_model) + max(self.n_experts, 1) * self._branch(d_model, self.d_ff, self.bias)

    def active(self, d_model: int) -> int:
        """Parameters that one token passes: top_k experts of n_experts."""
        return self._beside(d_model) + self._passed * self._branch(d_model, self.d_ff, self.bias)

    def products(self, d_model: int) -> int:
        """Weights of the matrix products that one token passes."""
        shared = self._branch(d_model, self.d_ff_shared, bias=False) + self.shared_gate * d_model
        return self.n_experts * d_model + self._passed * self._branch(d_model, self.d_ff, bias=False) + shared

    def experts(self, d_model: int) -> int:
        """Parameters of the routed experts; 0 for a dense feed-forward."""
        return self.n_experts * self._branch(d_model, self.d_ff, self.bias)

    def replicated(self, d_model: int) -> int:
        """Parameters that every TP rank has whole: the router, the shared gate, biases of the down products."""
        down = self.bias * max(self.n_experts, 1) + self.shared_bias
        return self._router(d_model) + (self.shared_gate + down) * d_model

    @property
    def _passed(self) -> int:
        return self.top_k if self.n_experts else 1

    def _router(self, d_model: int) -> int:
        return self.n_experts * (d_model + self.router_bias)

    def _beside(self, d_model: int) -> int:
        """Parameters of the router and of the shared expert."""
        shared = self._branch(d_model, self.d_ff_shared, self.shared_bias)
        return self._router(d_model) + shared + self.shared_gate * d_model

    def _branch(self, d_model: int, width: int, bias: bool) -> int:
        """Parameters of one expert, or of a dense feed-forward."""
        into = 2 if self.gated else 1
        return (into + 1) * d_model * width + bias * (into * width + d_model)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Equal layers.

    Attributes:
        count: how many.
        attention: of each.
        feed_forward: of each.
        n_norms: norms of width d_model in each: 2, or 4 (Gemma), or 1 where both branches share it.
        parallel: both branches read the same input (GPT-NeoX, Falcon, Phi) and are added together.
    """

    count: int
    attention: Attention
    feed_forward: FeedForward
    n_norms: int = 2
    parallel: bool = False

    def __post_init__(self) -> None:
        _positive(count=self.count)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A whole decoder.

    Attributes:
        name: as the user knows it.
        family: model_type of its config.json, or `gpt2` and `llama` of the reference models.
        d_model: width of the residual stream.
        vocab_size: rows of the embedding.
        layers: runs of equal layers, in order; kinds that alternate are one run each, by first appearance.
        norm: rms (one weight) | layer (weight and bias).
        tied_embeddings: the head is the embedding's weight.
        max_seq_len: longest sequence; None where nothing limits it.
        learned_positions: rows of a learned position table; 0 for rotary and other computed positions.
        head_bias: the head has a bias of vocab_size.
        final_norm: one more norm before the head.
        dropout: of the residual stream.
        softcap: logits or scores pass a tanh (Gemma 2), which keeps one more copy of them.
        spare_parameters: of no known place: what a bare number of parameters has beyond the shape chosen for it.
        confidence: exact | low (the shape was chosen for a bare number of parameters).
        source: where the sizes come from, for the explanation.

    Raises:
        SpecError: no layers, or a size below 1.
    """

    name: str
    family: str
    d_model: int
    vocab_size: int
    layers: tuple[DecoderLayer, ...]
    norm: Literal["rms", "layer"] = "rms"
    tied_embeddings: bool = False
    max_seq_len: int | None = None
    learned_positions: int = 0
    head_bias: bool = False
    final_norm: bool = True
    dropout: float = 0.0
    softcap: bool = False
    spare_parameters: int = 0
    confidence: Literal["exact", "low"] = "exact"
    source: str = ""

    def __post_init__(self) -> None:
        _positive(d_model=self.d_model, vocab_size=self.vocab_size, layers=len(self.layers))

    @property
    def n_layers(self) -> int:
        """Layers of all runs."""
        return sum(layer.count for layer in self.layers)

    @property
    def norm_weights(self) -> int:
        """Weights of a norm for each number of its width."""
        return 1 if self.norm == "rms" else 2

    @property
    def embedding_parameters(self) -> int:
        """Of the token embedding, which a tied head shares."""
        return self.vocab_size * self.d_model

    @property
    def head_parameters(self) -> int:
        """Of the head beyond the embedding."""
        weight = 0 if self.tied_embeddings else self.vocab_size * self.d_model
        return weight + self.head_bias * self.vocab_size

    @property
    def other_parameters(self) -> int:
        """Of what is in no layer and neither embedding nor head: learned positions, final norm, spare ones."""
        norm = self.final_norm * self.norm_weights * self.d_model
        return self.learned_positions * self.d_model + norm + self.spare_parameters

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied weight counts once."""
        outside = self.embedding_parameters + self.head_parameters + self.other_parameters
        return outside + sum(layer.count * self.layer_parameters(layer) for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: all but those of the experts it passes by (embedding and head counted)."""
        return self.num_parameters - sum(
            layer.count * (self.feed_forward_parameters(layer) - layer.feed_forward.active(self.d_model))
            for layer in self.layers
        )

    @property
    def head_matmul_parameters(self) -> int:
        """Weights of the product that makes the logits, tied or not; the embedding's look-up is no product."""
        return self.vocab_size * self.d_model

    @property
    def token_matmul_parameters(self) -> int:
        """Weights of all products that one token passes; 2 FLOP each forward, 6 with backward (scores apart).

        Kaplan et al., arXiv 2001.08361, section 2.1, with the head counted.
        """
        return self.head_matmul_parameters + sum(layer.count * self.matmul_parameters(layer) for layer in self.layers)

    def layer_parameters(self, layer: DecoderLayer) -> int:
        """Of one of these layers."""
        norms = layer.n_norms * self.norm_weights * self.d_model
        return self.attention_parameters(layer) + self.feed_forward_parameters(layer) + norms

    def attention_parameters(self, layer: DecoderLayer) -> int:
        """Of the attention of one of these layers, the norms inside it counted."""
        return layer.attention.parameters(self.d_model, self.norm_weights)

    def feed_forward_parameters(self, layer: DecoderLayer) -> int:
        """Of the feed-forward of one of these layers, with all experts and their router."""
        return layer.feed_forward.parameters(self.d_model)

    def expert_parameters(self, layer: DecoderLayer) -> int:
        """Of the routed experts of one of these layers, which expert parallelism deals out."""
        return layer.feed_forward.experts(self.d_model)

    def replicated_parameters(self, layer: DecoderLayer) -> int:
        """Of one of these layers, that every TP rank has whole."""
        norms = layer.n_norms * self.norm_weights * self.d_model
        attention = layer.attention.replicated(self.d_model, self.norm_weights)
        return norms + attention + layer.feed_forward.replicated(self.d_model)

    def matmul_parameters(self, layer: DecoderLayer) -> int:
        """Weights of the products of one of these layers that one token passes; 2 FLOP each forward."""
        return layer.attention.products(self.d_model) + layer.feed_forward.products(self.d_model)
