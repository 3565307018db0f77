"""Where a model's shape comes from: a name of the catalogue, a config.json, a bare number, or a recipe's own model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import CatalogError, SpecError
from meshwright.spec.decoder import Attention, DecoderLayer, DecoderSpec, FeedForward
from meshwright.spec.families import read_decoder
from meshwright.spec.family_count import decoder_of_count, parse_count
from meshwright.spec.nearest import closest, first_of, shown

if TYPE_CHECKING:
    from meshwright.spec.shape import DecoderShape  # it brings in all sections of a recipe

Entry = Mapping[str, Any]
"""One model of data/models.json: config (keys of its config.json), parameters, source; maybe aliases, router_bias."""


def catalogue() -> Mapping[str, Entry]:
    """Every model of the catalogue by its name, in the order of names."""
    import json  # only a name needs it

    path = Path(__file__).with_name("data") / "models.json"
    found: Mapping[str, Entry] = json.loads(path.read_text(encoding="utf-8"))
    return found


def find_model(text: str) -> DecoderSpec:
    """The decoder that a user names.

    Args:
        text: a number of parameters (`7B`, `1.3B`, `7e9`), a name of the catalogue (case, an owner before it and
            `-hf`, `-base`, `-instruct`, `-chat`, `-it`, `-pt` behind it do not matter), or a path to a config.json or
            to a folder that holds one. Where `owner/name` is a folder too, the folder is meant.

    Raises:
        CatalogError: none of these; names the nearest.
        SpecError: the file cannot be read, or describes no decoder that is known here.
    """
    count = parse_count(text)
    if count is not None:
        return decoder_of_count(count, text.strip())
    entries = catalogue()
    name = _named(text, entries)
    if _is_path(text) or (("/" in text or not name) and _exists(text)):
        return _of_file(_path(text))
    if name:
        return _of_entry(name, entries[name])
    raise _unknown(text, list(entries))


def decoder_of_shape(shape: DecoderShape) -> DecoderSpec:
    """The reference model of a recipe; models/gpt2.py and models/llama.py build these weights."""
    gpt2 = shape.name == "gpt2"
    heads = Attention(
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.head_dim,
        qkv_bias=gpt2,
        out_bias=gpt2,
    )
    branch = FeedForward(gated=not gpt2, d_ff=shape.d_ff, bias=gpt2)
    return DecoderSpec(
        name=shape.name,
        family=shape.name,
        d_model=shape.d_model,
        vocab_size=shape.vocab_size,
        layers=(DecoderLayer(count=shape.n_layers, attention=heads, feed_forward=branch),),
        norm="layer" if gpt2 else "rms",
        tied_embeddings=shape.tied_embeddings,
        max_seq_len=shape.max_seq_len,
        learned_positions=shape.max_seq_len if gpt2 else 0,
        dropout=shape.dropout,
        source=f'reference model "{shape.name}" of the recipe',
    )


def _of_entry(name: str, entry: Entry) -> DecoderSpec:
    spec = replace(read_decoder(entry["config"], name), source=str(entry["source"]))
    if not entry.get("router_bias"):
        return spec
    # transformers keeps this bias, which no gradient moves, as a buffer; the model's own program as a parameter.
    return replace(spec, layers=tuple(_with_router_bias(layer) for layer in spec.layers))


def _with_router_bias(layer: DecoderLayer) -> DecoderLayer:
    branch = layer.feed_forward
    return replace(layer, feed_forward=replace(branch, router_bias=branch.n_experts > 0))


def _of_file(path: Path) -> DecoderSpec:
    """Read a config.json, or the one of a folder."""
    import json

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise SpecError(f"model {shown(str(path))}", "has no config.json." if path.is_dir() else "is no file.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"model {shown(str(file))}", f"cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(config, dict):
        raise SpecError(
            f"model {shown(str(file))}", "holds no JSON object.", "A config.json is one, with a model_type."
        )
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return read_decoder(config, name)


def _is_path(text: str) -> bool:
    """Whether it is spelt as no name of a model is."""
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or text.endswith(".json")


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~somebody who does not exist
        return Path(text)


def _exists(text: str) -> bool:
    try:
        return bool(text.strip()) and Path(text).exists()
    except OSError:  # a name that no file system could hold
        return False


def _named(text: str, entries: Mapping[str, Entry]) -> str | None:
    """The name in the catalogue that a spelling means; None if none is."""
    names = {_words(one): name for name, entry in entries.items() for one in (name, *entry.get("aliases", ()))}
    words = _words(text.rsplit("/", 1)[-1])
    while words not in names and words.rpartition("-")[2] in ("hf", "base", "instruct", "chat", "it", "pt"):
        words = words.rpartition("-")[0]
    return names.get(words)


def _words(text: str) -> str:
    """One spelling for all that differ in case, in separators, or in one between a word and a number."""
    joined = re.sub(r"[\s_-]+", "-", text.strip().lower()).strip("-")
    return re.sub(r"(?<=[a-z])(?=\d)", "-", joined.removeprefix("meta-"))


def _unknown(text: str, names: list[str]) -> CatalogError:
    last = text.rsplit("/", 1)[-1].strip().lower()
    part = [name for name in names if last and last in name]
    near = first_of(part) if part else closest(last, names)
    known = f"Give a number such as 7B, a path to a config.json, or one of {len(names)} names: {first_of(names, 8)}."
    return CatalogError(
        f"model {shown(text)}", "is in no catalogue, and no file.", f"Nearest: {near}." if near else known
    )
