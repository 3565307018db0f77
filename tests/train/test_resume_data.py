"""A resumed run trains on the data it began with, or is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.errors import CheckpointError
from train.runs import changed, run_in


def table(path: Path, **data: Any) -> dict[str, Any]:
    return {
        "model": {"name": "gpt2", "n_layers": 1, "d_model": 16, "n_heads": 2, "vocab_size": 256},
        "data": {"path": str(path), "seq_len": 8, **data},
        "batch": {"global_batch_size": 4, "microbatch_size": 2},
        "optimizer": {"lr": 0.01},
        "train": {"steps": 6},
    }


def write_text(path: Path, letter: str) -> dict[str, Any]:
    path.write_text(letter * 999)
    return {"source": "text"}


def write_ids(path: Path, letter: str) -> dict[str, Any]:
    np.full(999, ord(letter), np.uint16).tofile(path)
    return {"source": "tokens"}


@pytest.mark.parametrize("write", [write_text, write_ids])
def test_other_data_of_the_same_size_is_refused_and_the_same_data_goes_on(run_ranks, tmp_path, write) -> None:
    path, folder = tmp_path / "data", str(tmp_path / "run")
    recipe = table(path, **write(path, "a"))
    run_ranks(1, run_in, changed(recipe, train={"stop_after": 3}), folder)
    write(path, "b")
    with pytest.raises(CheckpointError, match=re.escape("with other tokens than when the checkpoint was written")):
        run_ranks(1, run_in, recipe, folder, True)
    write(path, "a")
    (told,) = run_ranks(1, run_in, recipe, folder, True)
    assert told.summary["step"] == 6
