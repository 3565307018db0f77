"""Material of the spec tests: a small sound recipe, and hypothesis strategies of sound ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

SOUND = """
[model]
name = "llama"
n_layers = 2
d_model = 64
n_heads = 4
[batch]
global_batch_size = 16
[optimizer]
lr = 1e-3
[train]
steps = 100
"""

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63) + 1, 2**63 - 1)
PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | NUMBERS | WORDS | st.just(""),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"arg_[a-z]{1,6}", fullmatch=True), PLAIN, max_size=3)


def some(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Tables with any of these keys."""
    return st.fixed_dictionaries({}, optional=keys)


SHAPES = some(
    n_layers=st.integers(1, 9), d_ff=st.integers(1, 99), dropout=st.floats(0, 0.99), tied_embeddings=st.booleans()
)
LLAMAS = st.builds(
    lambda shape, heads, shared, half: {
        "name": "llama",
        "n_heads": heads * shared,
        "n_kv_heads": heads,
        "d_model": heads * shared * half * 2,
        **shape,
    },
    SHAPES,
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 8),
)
GPT2S = st.builds(
    lambda shape, heads, width: {
        "name": "gpt2",
        "n_heads": heads,
        "d_model": heads * width,
        "max_seq_len": 128,
        **shape,
    },
    SHAPES,
    st.integers(1, 4),
    st.integers(1, 16),
)
OTHERS = st.builds(lambda more: {"build": "a.b:c", **more}, ARGUMENTS) | st.builds(lambda name: {"hf": name}, WORDS)
DATA = (
    st.builds(lambda more: {"build": "pkg:rows", "seq_len": 64, **more}, ARGUMENTS)
    | st.builds(lambda path: {"source": "text", "path": path}, WORDS)
    | st.builds(lambda path: {"source": "tokens", "path": path, "token_dtype": "uint32"}, WORDS)
    | some(source=st.just("python-stdlib"), pack=st.booleans(), last_batch=st.sampled_from(["drop", "keep"]))
)
GROUPS = st.builds(lambda name, decay: [{"pattern": name, "weight_decay": decay}], WORDS, st.floats(0, 1))
OPTIMIZERS = st.builds(
    lambda lr, more: {"name": "adamw", "lr": lr, **more},
    st.floats(0, 10) | st.integers(0, 2),
    some(betas=st.lists(st.floats(0, 0.999), min_size=2, max_size=2), groups=GROUPS, max_grad_norm=st.floats(0.01, 9)),
)
LAYOUTS = st.sampled_from(
    [
        {},
        {"dp_replicate": 2},
        {"dp_shard": 2},
        {"dp_shard": 2, "zero_stage": 1, "tp": 3},
        {"pp": 2, "pp_schedule": "gpipe"},
    ]
)
TABLES = st.fixed_dictionaries(
    {
        "model": LLAMAS | GPT2S | OTHERS,
        "batch": st.builds(lambda size: {"global_batch_size": 2 * size}, st.integers(1, 99)),
        "optimizer": OPTIMIZERS,
        "train": st.builds(lambda steps, seed: {"steps": steps, "seed": seed}, st.integers(1, 999), st.integers(0, 9)),
    },
    optional={
        "data": DATA,
        "loss": st.just({"build": "my.losses:f"}),
        "layout": LAYOUTS,
        "schedule": some(name=st.sampled_from(["constant", "linear", "cosine"]), final_fraction=st.floats(0, 1)),
        "validation": st.just({"fraction": 0.1, "every_steps": 5}),
        "checkpoint": some(every_steps=st.integers(1, 9), keep_last=st.integers(1, 9)),
    },
)
