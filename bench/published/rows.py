"""Published runs with a memory figure, or that ran out of memory: runs.csv as values.

Every row names its source. An empty cell means that the source does not say; such a number is None here, and a row
that lacks what a prediction needs is not scored (see programs.py).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

RUNS: Final = Path(__file__).with_name("runs.csv")
GIB: Final = 2**30


def read_rows(path: Path = RUNS) -> tuple[Row, ...]:
    """All rows, in the file's order."""
    with open(path, encoding="utf-8", newline="") as file:
        return tuple(row_of(cells) for cells in csv.DictReader(file))


def row_of(cells: Mapping[str, str]) -> Row:
    """One line of the file."""
    known: dict[str, Any] = {name: cells[column] for name, column in TEXTS.items()}
    known |= {name: _integer(cells[column]) for name, column in NUMBERS.items()}
    return Row(
        measured_gib=_decimal(cells["measured_mem_gib_per_gpu"]),
        measured_states_gib=_decimal(cells["measured_states_gib"]),
        is_oom=cells["outcome"] == "oom",
        **known,
    )


def _integer(text: str) -> int | None:
    return int(text) if text else None


def _decimal(text: str) -> float | None:
    return float(text) if text else None


NUMBERS: Final = {
    "n_layers": "layers",
    "d_model": "hidden",
    "n_heads": "heads",
    "n_kv_heads": "kv_heads",
    "d_ff": "ffn_hidden",
    "vocab_size": "vocab",
    "seq_len": "seq_len",
    "dp": "dp",
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "ep": "ep",
    "chunks": "vpp",
    "microbatch_size": "micro_batch",
    "global_batch_size": "global_batch",
    "n_experts": "moe_experts",
    "top_k": "moe_topk",
}
TEXTS: Final = {
    "id": "id",
    "source_key": "source_key",
    "trust": "trust",
    "source": "source",
    "model": "model",
    "device": "gpu_type",
    "sharding": "zero_stage_or_fsdp",
    "precision": "precision",
    "attention": "attention_kernel",
    "recompute": "activation_checkpointing",
    "optimizer": "optimizer",
    "compiled": "compile",
    "schedule": "pp_schedule",
    "mem_kind": "mem_kind",
    "notes": "notes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run. Names as in the rest of meshwright; `dp` is the degree without cp, as the sources print it."""

    id: str
    source_key: str
    trust: str
    source: str
    model: str
    n_layers: int | None
    d_model: int | None
    n_heads: int | None
    n_kv_heads: int | None
    d_ff: int | None
    vocab_size: int | None
    seq_len: int | None
    device: str
    dp: int | None
    tp: int | None
    pp: int | None
    cp: int | None
    ep: int | None
    chunks: int | None
    sharding: str
    microbatch_size: int | None
    global_batch_size: int | None
    precision: str
    attention: str
    recompute: str
    optimizer: str
    compiled: str
    schedule: str
    n_experts: int | None
    top_k: int | None
    measured_gib: float | None
    measured_states_gib: float | None
    mem_kind: str
    is_oom: bool
    notes: str

    def says(self, words: str) -> bool:
        """Do the notes say so?"""
        return words in self.notes

    def said_number(self, option: str) -> int | None:
        """The number that the notes give after an option's name; None if they do not."""
        found = re.search(re.escape(option) + r" (\d+)", self.notes)
        return int(found.group(1)) if found else None

    @property
    def measured_bytes(self) -> float | None:
        """The figure. Sources that print "GB" show a tool's GiB; see programs.py, where it matters."""
        return None if self.measured_gib is None else self.measured_gib * GIB

    @property
    def is_one_dimensional(self) -> bool:
        """Data parallel only; the sequence may be cut too."""
        return self.tp == 1 and self.pp == 1

    @property
    def experiment(self) -> str:
        """What makes the row unlike others: figures of one experiment are printed once for several batch sizes."""
        skipped = ("id", "notes", "global_batch_size")
        return "|".join(str(getattr(self, one.name)) for one in fields(self) if one.name not in skipped)
