"""A trace is asked of a child process, and its failure is one line."""

from __future__ import annotations

import sys

import pytest

from meshwright.errors import SpecError
from meshwright.plan import ask_trace
from meshwright.plan.ask_trace import trace_in_child

TEXT = """
[model]
name = "llama"
n_layers = 3
d_model = 16
n_heads = 2
[data]
seq_len = 12
[batch]
global_batch_size = 4
[optimizer]
lr = 1e-3
[train]
steps = 1
"""


def test_a_child_traces_a_recipe() -> None:
    spec = trace_in_child(TEXT, ["model.n_layers=2", "precision.compute=bf16"], kernels="cuda", timeout_s=120)
    assert (spec.name, spec.n_layers, spec.compute, spec.seq_len) == ("llama", 2, "bf16", 12)
    assert "meta tensors" in spec.source


def test_what_the_child_says_is_one_line(tmp_path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(TEXT.replace('name = "llama"', 'build = "nosuch:thing"').replace("n_", "number_"))
    with pytest.raises(SpecError) as caught:
        trace_in_child(path, kernels="cpu", timeout_s=120)
    assert str(caught.value).startswith(f"the model of {path}: could not be traced: model.build = ")
    assert "there is no module `nosuch`" in str(caught.value) and "\n" not in str(caught.value)


def stand_in(tmp_path, monkeypatch, code: str) -> None:
    """A program in the place of the one that traces."""
    (tmp_path / "stand_in_for_a_trace.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ask_trace, "PROGRAM", "stand_in_for_a_trace")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import time; time.sleep(60)", r"the model of the recipe: was not traced within 0\.5 s\."),
        ("import os; os.kill(os.getpid(), 9)", r"its process said nothing \(killed by signal 9\)\."),
        ("raise ValueError('odd')", r"could not be traced: ValueError: odd"),
        ("pass", r"its process said nothing \(exit code 0\)\."),
        ("import sys; open(sys.argv[3], 'w').write('{}')", r"model\.json: is no model spec"),
    ],
    ids=["hangs", "killed", "raises", "writes nothing", "writes something else"],
)
def test_however_the_child_fails_the_caller_gets_a_line(code, message, tmp_path, monkeypatch) -> None:
    stand_in(tmp_path, monkeypatch, code)
    with pytest.raises(SpecError, match=message):
        trace_in_child(TEXT, kernels="cpu", timeout_s=0.5 if "sleep" in code else 30)


def test_asking_needs_no_torch_here() -> None:
    import subprocess

    code = "import sys, meshwright.plan.ask_trace; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr
