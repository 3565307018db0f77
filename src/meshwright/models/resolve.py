"""`build = "package.module:function"`: find the user's function, call it, and say exactly what went wrong."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pkgutil
import random
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy
import torch

from meshwright.errors import MeshwrightError, SpecError
from meshwright.spec.nearest import closest, listed


def resolve_callable(spec: str, key: str) -> Callable[..., Any]:
    """Import what a recipe names. The current directory is searched first, as `python -m` does.

    Args:
        spec: `package.module:function`; the part after the colon may have dots.
        key: the recipe key that holds it, for messages: `model.build`.

    Raises:
        SpecError: naming the part that failed.
    """
    asked = f'{key} = "{spec}"'
    path, colon, attribute = spec.partition(":")
    if not (colon and _is_dotted(path) and _is_dotted(attribute)):
        raise SpecError(asked, "is not of the form package.module:function.", _form_hint(spec))
    target: Any = _import(path, asked)
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise SpecError(asked, f"{_where(target)} has no `{part}`.", _did_you_mean(part, _public(target)))
        target = getattr(target, part)
    if not callable(target):
        rule = f"`{attribute}` is of type {type(target).__name__} and cannot be called."
        raise SpecError(asked, rule, "Name a function or a class.")
    found: Callable[..., Any] = target
    return found


def call_build(function: Callable[..., Any], arguments: Mapping[str, Any], *, spec: str, key: str, seed: int) -> Any:
    """Call the user's function with its section's keys under fixed random generators, so that every rank gets the same.

    Args:
        function: from `resolve_callable`.
        arguments: keyword arguments, as the recipe gives them.
        spec: what the recipe named, for messages.
        key: the recipe key that holds it.
        seed: of torch's, numpy's and Python's own generators during the call; their states are put back after it.

    Raises:
        SpecError: the arguments are not the function's, or the function itself failed.
    """
    asked = f'{key} = "{spec}"'
    _check_arguments(function, arguments, asked, key.rpartition(".")[0])
    try:
        with seeded(seed):
            return function(**arguments)
    except MeshwrightError:
        raise
    except (Exception, SystemExit) as error:
        raise SpecError(asked, f"failed: {describe(error)}") from error


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the global generators of torch, numpy and Python start from `seed`; after, they are as they were."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    # Of GPUs, the one in use: looking at the others would open a context on each.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


def describe(error: BaseException) -> str:
    """Type, message and the user's own line: `ValueError: no such size (models/mine.py:12)`."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({_short(error.filename or '?')}:{error.lineno})"
    place = _user_line(error)
    return f"{text} ({place})" if place else text


def _import(path: str, asked: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()  # the file may be younger than Python's listing of its folder
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise SpecError(asked, f"importing `{path}` failed: {describe(error)}") from error
        rule = f"there is no module `{error.name}` in {here} or on the Python path."
        raise SpecError(asked, rule, _module_hint(error.name)) from error
    except (Exception, SystemExit) as error:
        raise SpecError(asked, f"importing `{path}` failed: {describe(error)}", _import_hint(error)) from error


def _module_hint(missing: str) -> str:
    """The nearest module beside the one that is missing."""
    parent, _, name = missing.rpartition(".")
    if not parent:
        return _did_you_mean(name, (module.name for module in pkgutil.iter_modules()))
    folder = getattr(sys.modules[parent], "__path__", None)
    if folder is None:
        return f"`{parent}` is a module without modules below it: write {parent}:{name} for what is inside it."
    return _did_you_mean(name, (module.name for module in pkgutil.iter_modules(folder)), f"{parent}.")


def _import_hint(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return 'Put what the file does as a script under `if __name__ == "__main__":`.'
    return ""


def _check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], asked: str, section: str) -> None:
    """Refuse keys that the function does not take, and keys that it needs and does not get."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without a signature: the call itself will tell
        return
    parameters = signature.parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    header = f"{getattr(function, '__name__', 'it')}{signature}"
    unknown = [name for name in arguments if name not in named]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        hint = _did_you_mean(unknown[0], named.keys() - arguments.keys())
        raise SpecError(asked, f"{header} takes no argument {listed((f'`{name}`' for name in unknown), 'and')}.", hint)
    missing = [name for name, p in named.items() if p.default is p.empty and name not in arguments]
    missing += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if missing:
        hint = f"Add {listed((f'{name} = ...' for name in missing), 'and')} to [{section}]." if section else ""
        raise SpecError(asked, f"{header} needs {listed((f'`{name}`' for name in missing), 'and')}.", hint)


def _user_line(error: BaseException) -> str:
    """File and line of the deepest frame in the user's own code, not an installed package's or ours."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = sysconfig.get_paths()
    foreign = tuple(os.path.join(folder, "") for folder in (ours, paths["stdlib"], paths["purelib"], paths["platlib"]))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if not os.path.abspath(frame.filename).startswith(foreign)]
    return f"{_short(own[-1].filename)}:{own[-1].lineno}" if own else ""


def _short(path: str) -> str:
    """A path relative to the current directory, where it is below."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") or relative == "." else relative


def _is_dotted(text: str) -> bool:
    return bool(text) and all(part.isidentifier() for part in text.split("."))


def _form_hint(spec: str) -> str:
    module, dot, function = spec.replace("/", ".").replace(".py:", ":").rpartition(".")
    if ":" in spec:
        likely = spec.replace("/", ".").replace(".py:", ":").lstrip(".")
    else:
        likely = f"{module}:{function}" if dot else ""
    return f'Did you mean "{likely}"?' if all(_is_dotted(part) for part in likely.split(":")) and ":" in likely else ""


def _did_you_mean(word: str, choices: Any, prefix: str = "") -> str:
    found = closest(word, choices)
    return f"Did you mean `{prefix}{found}`?" if found else ""


def _public(target: Any) -> list[str]:
    return [name for name in dir(target) if not name.startswith("_")]


def _where(target: Any) -> str:
    name = getattr(target, "__name__", type(target).__name__)
    return f"module `{name}` ({_short(target.__file__)})" if getattr(target, "__file__", None) else f"`{name}`"
