"""The reference models compute what their formulas say, in fp64 to the last digits, with odd sizes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.build import build_reference
from meshwright.models.gpt2 import Gpt2
from meshwright.models.llama import Llama, rotate, rotation
from meshwright.spec.sections import ModelSection
from meshwright.spec.shape import DecoderShape, resolve_shape

VOCAB, SEQ = 131, 24
TOKENS = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(0))


def odd_shape(name: str, **keys: object) -> DecoderShape:
    sizes = {"n_layers": 2, "d_model": 36, "n_heads": 6, "d_ff": 101, "vocab_size": VOCAB}
    if name == "llama":
        sizes |= {"n_kv_heads": 2, "head_dim": 10}
    return resolve_shape(ModelSection(name=name, **(sizes | keys)), SEQ, VOCAB)


def build(name: str, dtype: torch.dtype = torch.float64, **keys: object) -> Gpt2 | Llama:
    model = build_reference(odd_shape(name, **keys), 0, dtype)
    for name_, p in model.named_parameters():  # so that biases and norms matter
        if p.dim() == 1:
            p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name_))).to(dtype)
    return model


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head, one sample, place by place: q, k, v of (s, c)."""
    rows = []
    for i in range(q.size(0)):
        scores = [math.exp(float(q[i] @ k[j]) / math.sqrt(q.size(1))) for j in range(i + 1)]
        weights = torch.tensor(scores, dtype=torch.float64)
        rows.append((weights / weights.sum()) @ v[: i + 1])
    return torch.stack(rows)


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding by complex numbers: (s, c)."""
    half = x.size(1) // 2
    z = torch.complex(x[:, :half], x[:, half:])
    rows = [
        [complex(z[i, j]) * complex(math.cos(a := i * theta ** (-2 * j / x.size(1))), math.sin(a)) for j in range(half)]
        for i in range(x.size(0))
    ]
    out = torch.tensor(rows, dtype=torch.complex128)
    return torch.cat((out.real, out.imag), dim=1)


def by_hand(model: Gpt2 | Llama, tokens: Tensor) -> Tensor:
    """Logits of one sequence, head by head, from the weights alone."""
    w, shape = model.state_dict(), model.shape
    llama = isinstance(model, Llama)
    c, group = shape.head_dim, shape.n_heads // shape.n_kv_heads

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))

    def norm(x: Tensor, name: str) -> Tensor:
        if llama:
            return x / (x.pow(2).mean(1, keepdim=True) + shape.norm_eps).sqrt() * w[f"{name}.weight"]
        x = x - x.mean(1, keepdim=True)
        return x / (x.pow(2).mean(1, keepdim=True) + shape.norm_eps).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(x: Tensor, at: str) -> Tensor:
        q, k, v = (linear(x, f"{at}.{part}") for part in ("query", "key", "value"))
        heads = []
        for head in range(shape.n_heads):
            mine, theirs = slice(head * c, head * c + c), slice(head // group * c, head // group * c + c)
            pair = (q[:, mine], k[:, theirs])
            qh, kh = (turned(t, shape.rope_theta) for t in pair) if llama else pair
            heads.append(softmax_attention(qh, kh, v[:, theirs]))
        return linear(torch.cat(heads, dim=1), f"{at}.out")

    def feed_forward(x: Tensor, at: str) -> Tensor:
        up = linear(x, f"{at}.up")
        if llama:
            gate = linear(x, f"{at}.gate")
            return linear(gate / (1 + (-gate).exp()) * up, f"{at}.down")
        cube = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
        return linear(0.5 * up * (1 + cube.tanh()), f"{at}.down")

    x = w["embedding.weight"][tokens]
    if not llama:
        x = x + w["positions.weight"][: len(tokens)]
    for i in range(shape.n_layers):
        x = x + attention(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attention")
        x = x + feed_forward(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.feed_forward")
    return norm(x, "norm") @ w["head.weight"].T


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_fp64_logits_equal_the_formula(name: str) -> None:
    model = build(name)
    with torch.no_grad():
        logits = model(TOKENS)
        wanted = torch.stack([by_hand(model, row) for row in TOKENS])
    assert logits.shape == (2, SEQ, VOCAB)
    # fp64 rounds at 1e-16; any fp32 value on the way would show at 1e-8.
    torch.testing.assert_close(logits, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_activation_keeps_the_dtype(name: str, dtype: torch.dtype) -> None:
    model, seen = build(name, dtype, dropout=0.1), set()
    for module in model.modules():
        module.register_forward_hook(lambda m, args, out: seen.add(out.dtype))
    model(TOKENS).sum().backward()
    assert seen == {dtype}
    assert {p.grad.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_fp64_gradients_are_right(name: str, tied: bool) -> None:
    model = build(name, n_layers=1, tied_embeddings=tied)
    labels = TOKENS.roll(-1, 1)

    def loss() -> Tensor:
        return F.cross_entropy(model(TOKENS).flatten(0, 1), labels.flatten())

    loss().backward()
    g = torch.Generator().manual_seed(1)
    for p in model.parameters():
        direction, step = torch.randn(p.shape, generator=g, dtype=p.dtype), 1e-6
        with torch.no_grad():
            p += step * direction
            above = loss()
            p -= 2 * step * direction
            below = loss()
            p += step * direction
        slope = (above - below) / (2 * step)  # wrong by step**2, and by rounding / step
        torch.testing.assert_close((p.grad * direction).sum(), slope, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_future_does_not_change_the_past(name: str, dropout: float) -> None:
    model, changed = build(name, torch.float32, dropout=dropout), TOKENS.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % VOCAB
    torch.manual_seed(0)
    before = model(TOKENS)
    torch.manual_seed(0)
    after = model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_tied_head_is_the_embedding_and_gets_both_gradients(name: str) -> None:
    tied, untied = build(name, tied_embeddings=True), build(name, tied_embeddings=False)
    assert tied.head.weight is tied.embedding.weight
    untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
    both = untied.embedding.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, both, rtol=1e-12, atol=1e-15)


def test_only_gpt2_ties_by_default() -> None:
    assert build("gpt2").head.weight is build("gpt2").embedding.weight or odd_shape("gpt2").tied_embeddings
    assert odd_shape("gpt2").tied_embeddings and not odd_shape("llama").tied_embeddings


def test_rotation_depends_on_the_distance_alone() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(10, dtype=torch.float64, generator=g), torch.randn(10, dtype=torch.float64, generator=g)
    turn = rotation(SEQ, 10, 10000.0, like=q)
    qs, ks = rotate(q.expand(1, 1, SEQ, 10), turn)[0, 0], rotate(k.expand(1, 1, SEQ, 10), turn)[0, 0]
    scores = qs @ ks.T
    torch.testing.assert_close(scores[3:, 3:], scores[:-3, :-3], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scores[0, 0], q @ k)


def test_rotation_at_a_far_place_is_as_good_as_its_dtype() -> None:
    place, turn = 131071, rotation(131072, 64, 500000.0, like=torch.empty(0, dtype=torch.float32))
    exact = [math.cos(place * 500000.0 ** (-2 * i / 64)) for i in range(32)]
    torch.testing.assert_close(turn[0, place, :32], torch.tensor(exact), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_dropout_acts_in_training_only(name: str) -> None:
    model = build(name, torch.float32, dropout=0.5)
    assert not torch.equal(model(TOKENS), model(TOKENS))
    model.eval()
    assert torch.equal(model(TOKENS), model(TOKENS))


def test_gpt2_drops_where_its_formula_says() -> None:
    model = build("gpt2", torch.float32, dropout=0.5, n_layers=1)
    x = torch.randn(1, SEQ, 36)
    for part in (model.dropout, model.blocks[0].dropout):
        assert part.p == 0.5
    attention = model.blocks[0].attention
    assert not torch.equal(attention(x), attention(x))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_module_names(name: str) -> None:
    wanted = {"embedding", "blocks", "norm", "head"} | ({"positions", "dropout"} if name == "gpt2" else set())
    assert {part for part, _ in build(name).named_children()} == wanted
    assert not list(build(name).buffers())
