"""DecoderShape: defaults, exact counts, and refusals that name the nearest sizes that work."""

import subprocess
import sys

import pytest

from meshwright.errors import SpecError
from meshwright.models.build import build_reference
from meshwright.spec.sections import ModelSection
from meshwright.spec.shape import resolve_shape


def shape(vocab=256, seq_len=128, **keys):
    return resolve_shape(ModelSection(**keys), seq_len, vocab)


def published(name, n_layers, d_model, n_heads, d_ff, vocab, **keys):
    return shape(vocab, 1024, name=name, n_layers=n_layers, d_model=d_model, n_heads=n_heads, d_ff=d_ff, **keys)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [  # published counts; rows of shared/cases/configs.csv
        (published("gpt2", 12, 768, 12, 3072, 50257), 124_439_808),
        (published("llama", 16, 2048, 32, 8192, 128256, n_kv_heads=8, tied_embeddings=True), 1_235_814_400),
        (published("llama", 30, 576, 9, 1536, 49152, n_kv_heads=3, tied_embeddings=True), 134_515_008),
        (published("llama", 126, 16384, 128, 53248, 128256, n_kv_heads=8), 405_853_388_800),
    ],
)
def test_published_parameter_counts(sizes, wanted):
    assert sizes.num_parameters == wanted


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "keys",
    [
        {"name": "gpt2", "d_model": 36, "d_ff": 101, "n_heads": 3},
        {"name": "gpt2", "max_seq_len": 200},
        {"name": "llama", "d_model": 36, "n_heads": 6, "n_kv_heads": 2, "head_dim": 10, "d_ff": 101},
        {"name": "llama"},
    ],
)
def test_counts_equal_the_real_models(keys, tied):
    sizes = shape(131, 24, **keys, tied_embeddings=tied)
    model = build_reference(sizes, 0)
    assert sizes.num_parameters == sum(p.numel() for p in model.parameters())
    assert sizes.block_parameters == sum(p.numel() for p in model.blocks[0].parameters())


def test_what_is_left_out_is_filled_in():
    gpt2, llama = shape(name="gpt2"), shape(name="llama", d_model=104)
    assert (gpt2.d_ff, gpt2.n_kv_heads, gpt2.head_dim, gpt2.max_seq_len, gpt2.tied_embeddings) == (
        512,
        4,
        32,
        128,
        True,
    )
    assert (llama.d_ff, llama.vocab_size, llama.tied_embeddings) == (280, 256, False)  # 8/3 of 104 is 277.3
    assert shape(name="llama", d_model=96, n_heads=4).d_ff == 256  # 8/3 of 96 is a multiple of 8 already
    assert shape(name="gpt2", tied_embeddings=False).tied_embeddings is False


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"name": "llama", "n_heads": 6, "n_kv_heads": 4, "d_model": 36},
            ["model.n_kv_heads", "4 does not divide n_heads = 6", "3 or 6"],
        ),
        ({"name": "gpt2", "n_heads": 5}, ["model.n_heads", "128 % 5 = 3", "n_heads = 4 or 8"]),
        ({"name": "llama", "n_heads": 5}, ["model.n_heads", "Or name a head_dim"]),
        ({"name": "llama", "head_dim": 9}, ["model.head_dim", "9 is odd", "8 or 10"]),
        ({"name": "llama", "head_dim": 1}, ["head_dim = 2."]),
        ({"name": "llama", "n_heads": 128}, ["model.head_dim", "1 is odd"]),
        ({"name": "gpt2", "n_kv_heads": 2}, ["model.n_kv_heads", 'name = "llama"']),
        ({"name": "gpt2", "head_dim": 64}, ["model.head_dim", "32 wide, not 64"]),
        ({"name": "gpt2", "max_seq_len": 64}, ["model.max_seq_len", "data.seq_len = 128", "Nearest that works: 128"]),
        ({"name": "gpt2", "vocab_size": 100}, ["model.vocab_size", "256 ids"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused(keys, said):
    with pytest.raises(SpecError) as caught:
        shape(**keys)
    for words in said:
        assert words in str(caught.value)


def test_every_fault_is_reported():
    with pytest.raises(SpecError) as caught:
        shape(name="gpt2", n_heads=5, vocab_size=3, max_seq_len=7)
    assert [fault.where for fault in caught.value.faults] == ["model.n_heads", "model.vocab_size", "model.max_seq_len"]


def test_data_without_a_tokenizer_needs_vocab_size():
    with pytest.raises(SpecError, match="vocab_size"):
        shape(vocab=None, name="gpt2")
    assert shape(vocab=None, name="gpt2", vocab_size=77).vocab_size == 77


def test_it_is_free_of_torch():
    code = "import sys, meshwright.spec.shape; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
