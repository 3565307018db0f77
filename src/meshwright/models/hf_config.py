"""What `[model] hf = PATH` names: its folder, its config.json, and whether that is a model to train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from meshwright.errors import MeshwrightError, SpecError
from meshwright.models.resolve import describe
from meshwright.models.weights import find_files

T = TypeVar("T")
_DOWNLOADED: Final = ["config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"]


def hf_vocab_size(hf: str) -> int | None:
    """Rows of the model's embedding, as its config.json has it."""
    asked = f'model.hf = "{hf}"'
    with quiet(asked):
        return vocab_size_of(read_config(find_folder(hf, asked), asked))


@contextmanager
def quiet(asked: str) -> Iterator[None]:
    """Import transformers, and keep its bars and hints off the console while it works: every rank would print them."""
    try:
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
        from transformers.utils import logging
    except ImportError as error:
        raise SpecError(asked, f"needs transformers ({error}).", 'Install it: pip install "meshwright[hf]".') from error
    level, loads, fetches = logging.get_verbosity(), logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if loads:
            logging.enable_progress_bar()
        if fetches:
            enable_progress_bars()


def find_folder(hf: str, asked: str) -> Path:
    """Where config.json is. A hub id is fetched into the hub's own cache, which lets ranks that ask at once wait.

    Raises:
        SpecError: it is neither a folder nor a model that can be fetched.
    """
    path = Path(hf).expanduser()
    if path.is_dir():
        return path
    if path.exists() or hf.startswith((".", "/", "~")) or hf.count("/") > 1:
        raise SpecError(asked, "is no folder.", f"Nearest: {path.parent}." if path.is_file() else "")
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(hf, allow_patterns=_DOWNLOADED))
    except Exception as error:  # of many kinds: no network, no such model, not allowed, disk full
        rule = f"is no folder, and could not be fetched from the hub: {_one_line(error)}"
        raise SpecError(asked, rule, "Give a folder that holds its config.json and its safetensors files.") from error
    if not find_files(folder, asked):
        rule = "has no safetensors weights on the hub; pickles are not read."
        raise SpecError(asked, rule, "To train it from scratch, give a folder with its config.json.")
    return folder


def read_config(folder: Path, asked: str) -> Any:
    """Read config.json.

    Raises:
        SpecError: there is none, or it describes no causal language model with weights that can be trained.
    """
    import transformers

    if not (folder / "config.json").is_file():
        raise SpecError(asked, f"{folder} has no config.json.")
    load = transformers.AutoConfig.from_pretrained
    config = attempt(asked, "reading config.json", partial(load, folder, trust_remote_code=False))
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in causal:
        raise SpecError(asked, f"is of type {config.model_type}, which has no causal language model in transformers.")
    made, bare = _classes(causal, config), _classes(transformers.MODEL_MAPPING, config)
    said = list(config.architectures or made)
    if not {*said} & {*made, *bare}:
        near = f'To train that all the same, write "architectures": ["{made[0]}"] in config.json.'
        raise SpecError(asked, f"is a {', '.join(said)}; what is trained is a {made[0]}.", near)
    if getattr(config, "quantization_config", None):
        raise SpecError(asked, "is quantised, and masters are fp32.", "Take the model that it was made from.")
    return config


def _classes(mapping: Any, config: Any) -> list[str]:
    """Names of the classes that transformers has for this kind of config; mostly one."""
    found = mapping.get(type(config), ())
    return [cls.__name__ for cls in (found if isinstance(found, tuple | list) else (found,))]


def vocab_size_of(config: Any) -> int | None:
    """Rows of the embedding."""
    size: int | None = getattr(config.get_text_config(), "vocab_size", None)
    return size


def attempt(asked: str, doing: str, work: Callable[[], T]) -> T:
    """Let transformers work; what it refuses becomes one line."""
    try:
        return work()
    except MeshwrightError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            rule = "needs code that comes with it (auto_map in config.json), which is not run."
            raise SpecError(asked, rule, 'Read that code, and name it in build = "package.module:function".') from error
        raise SpecError(asked, f"{doing} failed: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    text = " ".join(describe(error).split()).rstrip(".")
    return f"{text}." if len(text) <= 300 else f"{text[:297]}..."
