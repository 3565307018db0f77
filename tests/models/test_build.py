"""`build_model` and `build = "package.module:function"`: what is built, and what is said when it cannot be."""

import random
import sys

import numpy
import pytest
import torch
from torch import nn

from meshwright.errors import SpecError
from meshwright.models.build import build_model
from meshwright.models.gpt2 import Gpt2
from meshwright.models.llama import Llama
from meshwright.models.resolve import call_build, resolve_callable, seeded
from meshwright.spec.sections import ModelSection

SOURCE = """
import random

import numpy
import torch
from torch import nn


def make(width: int, depth: int = 1, *, bias: bool = True) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(depth)))


def tied():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)})
    model["b"].weight = model["a"].weight
    return model


def drawing():
    model = nn.Linear(2, 2)
    model.register_buffer("drawn", torch.tensor([random.random(), numpy.random.rand()]))
    return model


def pretrained():
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 0.25)
    return model


class Own(nn.Module):
    @classmethod
    def small(cls):
        return cls()


def failing(size=3):
    return check(size)


def check(size):
    raise ValueError(f"no such size: {size}")


def in_torch():
    return nn.Linear(2, 2)(torch.zeros(5))


def leaving():
    raise SystemExit(3)


def anything(**keys):
    return nn.Linear(keys["n"], 1)


give_none = lambda: None
give_class = lambda: Own
give_dict = lambda: {"model": nn.Linear(1, 1)}
give_lazy = lambda: nn.LazyLinear(3)
give_meta = lambda: nn.Linear(1, 1, device="meta")
number = 5
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current directory with the user's modules, forgotten again after the test."""
    package = tmp_path / "own_models"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text(SOURCE)
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_here\n")
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(2)\n")
    (tmp_path / "crashing.py").write_text("x = 1\ny = x / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.split(".")[0] in ("own_models", "needs_more", "broken", "script", "crashing"):
            del sys.modules[name]


def build(spec, seed=0, dtype=torch.float32, **arguments):
    section = ModelSection(build=spec, arguments=arguments)
    return build_model(section, seq_len=8, tokenizer_vocab=None, seed=seed, dtype=dtype)


def weights(model):
    return torch.cat([t.flatten() for t in model.state_dict().values()])


def test_reference_models_by_name():
    for name, kind in (("gpt2", Gpt2), ("llama", Llama)):
        section = ModelSection(name=name, n_layers=1, d_model=16, n_heads=2)
        model = build_model(section, seq_len=8, tokenizer_vocab=11, seed=0, dtype=torch.float64)
        assert isinstance(model, kind) and model.training
        assert {p.dtype for p in model.parameters()} == {torch.float64} and not any(
            p.is_meta for p in model.parameters()
        )


def test_own_model_is_equal_whatever_was_drawn_before(folder):
    one = build("own_models.nets:make", width=5, depth=2)
    torch.rand(3), random.random(), numpy.random.rand()
    two = build("own_models.nets:make", width=5, depth=2)
    assert torch.equal(weights(one), weights(two))
    assert not torch.equal(weights(one), weights(build("own_models.nets:make", seed=1, width=5, depth=2)))


def test_numpy_and_random_are_seeded_too(folder):
    assert torch.equal(build("own_models.nets:drawing").drawn, build("own_models.nets:drawing").drawn)


def test_the_generators_are_put_back(folder):
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    wanted = (torch.rand(1).item(), random.random(), numpy.random.rand())
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    with pytest.raises(ZeroDivisionError), seeded(5):
        torch.rand(1), random.random(), numpy.random.rand(), 1 / 0
    assert (torch.rand(1).item(), random.random(), numpy.random.rand()) == wanted


def test_what_the_constructor_made_is_kept(folder):
    assert (build("own_models.nets:pretrained").weight == 0.25).all()


def test_the_dtype_of_masters_keeps_ties(folder):
    model = build("own_models.nets:tied", dtype=torch.float64)
    assert model["a"].weight is model["b"].weight
    assert {t.dtype for t in model.state_dict().values()} == {torch.float64, torch.int64}  # num_batches_tracked


def test_classes_methods_and_open_keywords(folder):
    assert type(build("own_models.nets:Own")).__name__ == "Own"
    assert type(build("own_models.nets:Own.small")).__name__ == "Own"
    assert build("own_models.nets:anything", n=4).in_features == 4
    assert resolve_callable("torch.nn:Linear", "data.build") is nn.Linear


@pytest.mark.parametrize(
    ("spec", "arguments", "said"),
    [
        ("own_models.nets", {}, ["not of the form", 'Did you mean "own_models:nets"?']),
        ("own_models/nets.py:make", {}, ['Did you mean "own_models.nets:make"?']),
        (":make", {}, ["not of the form"]),
        ("own_model.nets:make", {}, ["no module `own_model`", "Did you mean `own_models`?"]),
        ("own_models.net:make", {}, ["no module `own_models.net`", "Did you mean `own_models.nets`?"]),
        ("own_models.nets.make:f", {}, ["no module `own_models.nets.make`", "write own_models.nets:make"]),
        ("own_models.nets:mak", {}, ["`own_models.nets` (own_models/nets.py) has no `mak`", "Did you mean `make`?"]),
        ("own_models.nets:Own.smal", {}, ["`Own` has no `smal`", "Did you mean `small`?"]),
        ("own_models.nets:number", {}, ["of type int", "cannot be called"]),
        ("own_models.nets:make", {"widht": 3}, ["make(width: int, depth", "no argument `widht`", "mean `width`?"]),
        ("own_models.nets:make", {}, ["needs `width`", "Add width = ... to [model]."]),
        ("own_models.nets:failing", {}, ["failed: ValueError: no such size: 3 (own_models/nets.py:42)"]),
        ("own_models.nets:in_torch", {}, ["failed: RuntimeError", "(own_models/nets.py:46)"]),
        ("own_models.nets:leaving", {}, ["failed: SystemExit: 3"]),
        ("own_models.nets:give_none", {}, ["returned None", "without `return`"]),
        ("own_models.nets:give_class", {}, ["returned the class Own", "Return Own(...)"]),
        ("own_models.nets:give_dict", {}, ["returned a value of type dict", "Return the model alone"]),
        ("own_models.nets:give_lazy", {}, ["`weight` has no shape yet"]),
        ("own_models.nets:give_meta", {}, ["`weight` is on the meta device"]),
        ("needs_more:f", {}, ["importing `needs_more` failed: ModuleNotFoundError", "(needs_more.py:1)"]),
        ("broken:f", {}, ["SyntaxError", "(broken.py:2)"]),
        ("script:f", {}, ["SystemExit: 2 (script.py:2)", "__main__"]),
        ("crashing:f", {}, ["ZeroDivisionError: division by zero (crashing.py:2)"]),
    ],
)  # fmt: skip
def test_failures_say_which_part(folder, spec, arguments, said):
    with pytest.raises(SpecError) as caught:
        build(spec, **arguments)
    assert str(caught.value).startswith(f'model.build = "{spec}"')
    for words in said:
        assert words in str(caught.value)


def test_the_users_exception_is_chained_for_debug(folder):
    with pytest.raises(SpecError) as caught:
        build("own_models.nets:failing")
    assert isinstance(caught.value.__cause__, ValueError)


def test_our_own_errors_pass_through():
    def refuse():
        raise SpecError("data.path", "is empty.")

    with pytest.raises(SpecError, match=r"^data\.path: is empty"):
        call_build(refuse, {}, spec="m:refuse", key="data.build", seed=0)


def test_a_callable_without_a_signature():
    with pytest.raises(SpecError, match="failed: TypeError"):
        call_build(int, {"no_such": 1}, spec="m:f", key="data.build", seed=0)
