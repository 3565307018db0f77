"""What the tests of wrong use share: a sound recipe, a module of a user who does everything wrong, and a check."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cli.warm import Result

RECIPE = """
[model]
build = "mine:model"
[data]
build = "mine:data"
workers = 0
[loss]
build = "mine:loss"
[batch]
global_batch_size = 12
microbatch_size = 2
[optimizer]
name = "sgd"
lr = 0.1
[train]
steps = 3
timeout_s = 10.0
"""

MINE = """
import os, sys, torch
from torch import nn

def model():
    return nn.Linear(4, 4)

def data():
    return [torch.full((4,), i / 24) for i in range(24)]

def loss(model, batch):
    return ((model(batch) - batch) ** 2).sum(), len(batch)

# what can be wrong with a model
def raises(): raise ValueError("no such size")
def returns_none(): nn.Linear(4, 4)
def returns_class(): return nn.Linear
def returns_pair(): return nn.Linear(4, 4), "tokenizer"
def sized(width, depth=2): return nn.Linear(width, width)
def on_meta():
    with torch.device("meta"):
        return nn.Linear(4, 4)
def lazy(): return nn.LazyLinear(4)
def frozen(): return nn.Linear(4, 4).requires_grad_(False)
def exits(): sys.exit("not here")
def parallel(): return nn.DataParallel(nn.Linear(4, 4))
def random_each_time(): return nn.Linear(4, 4).requires_grad_(True) if not os.environ.get("RANK") else seeded_by_rank()
def seeded_by_rank():
    torch.manual_seed(int(os.environ["RANK"]))
    return nn.Linear(4, 4)
not_callable = 7

# what can be wrong with data
class Broken:
    def __len__(self): return 24
    def __getitem__(self, i):
        if i == 7: raise OSError("disk on fire")
        return torch.full((4,), i / 24)
def broken(): return Broken()
def ragged(): return [torch.zeros(4 + i % 2) for i in range(24)]
def iterator(): return iter([torch.zeros(4)])
def empty(): return []
def strings(): return ["a"] * 24
def number(): return 5
def poisoned(): return [torch.full((4,), float("nan") if i == 20 else i / 24) for i in range(24)]

# what can be wrong with a loss
def detached(model, batch): return ((model(batch) - batch) ** 2).sum().detach(), len(batch)
def a_string(model, batch): return "small"
def a_vector(model, batch): return ((model(batch) - batch) ** 2).sum(1), len(batch)
def fails(model, batch): return model(batch)[:, 9].sum(), len(batch)
def one_argument(model): return 0
def not_a_number(model, batch): return model(batch).sum() * float("nan"), len(batch)
def leaves(model, batch):
    if os.environ["RANK"] == "1": sys.exit(3)
    return loss(model, batch)
def vanishes(model, batch):
    if os.environ["RANK"] == "1": os._exit(0)
    return loss(model, batch)

# what can be wrong with an optimizer
def no_optimizer(groups, lr): return None
def picky(groups, lr, colour): return torch.optim.SGD(groups, lr=lr)
"""


IMPATIENT = "import meshwright.streams as streams\nstreams._PATIENCE_S = 0.1"
"""For `before`: a rank that is not its node's first waits less for the first to say what is wrong."""


@dataclass(frozen=True)
class Wrong:
    """One mistake.

    Attributes:
        words: of the command, after `meshwright`; for `train`, see `train`.
        code: the exit code.
        says: fragments that the error must have, in stderr.
        files: files to write first, beside recipe and module.
        env: variables.
        before: code that runs in the process first.
        runs: True if the run had begun, so that its folder is there.
    """

    words: tuple[str, ...]
    code: int
    says: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    runs: bool = False


def train(*words: str, code: int = 2, says: tuple[str, ...] | str, **more: object) -> Wrong:
    """`train r.toml --run-dir run WORDS`, where a word without dashes is an override."""
    flags = [word for word in words if word.startswith("-") or word.lstrip("-").isdigit()]
    sets = [word for word in words if word not in flags]
    line = ("train", "r.toml", "--run-dir", "run", *flags, *(("--set", *sets) if sets else ()))
    return Wrong(line, code, (says,) if isinstance(says, str) else says, **more)  # type: ignore[arg-type]


def lay_out(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write the recipe, the module and the files."""
    for name, content in ({"r.toml": RECIPE, "mine.py": textwrap.dedent(MINE)} | dict(files)).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def check(case: Wrong, result: Result) -> None:
    """The contract of every error: code, words, no traceback, nothing left in the temporary folder."""
    text = result.out + result.err
    assert result.code == case.code, text
    for words in case.says:
        assert words in result.err, f"{words!r} is not in: {text}"
    assert "Traceback" not in text
    assert result.err.splitlines()[0].startswith("error: "), text
    assert result.err.count("error: ") == 1, text
    assert result.left == [], result.left
    assert result.seconds < 30.0  # a hang is the time-out of 10 s and more, on a busy machine; seen: below 5 s
