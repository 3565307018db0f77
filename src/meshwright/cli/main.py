"""The command line: which words it takes, and how it ends. Commands are imported when they are called, torch later."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn, final

from meshwright.errors import MeshwrightError
from meshwright.streams import discard_stdout, wait_for_first_of_node, write_line
from meshwright.version import __version__

EPILOG: Final = """\
exit codes: 0 done; 2 a wrong description; 3 nothing fits; 4 a failed run; 5 a checkpoint; 70 our own bug; 130 Ctrl-C
every key of a recipe: docs/recipe.md"""


def entry() -> NoReturn:
    """Run the program and exit with its code."""
    _open_closed_streams()
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
        arguments: the words after the program's name.

    Returns:
        The exit code (see `errors`).
    """
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold what this terminal's encoding has not
    try:
        code = int(_command(options))
        sys.stdout.flush()
        return code
    except MeshwrightError as error:
        _say(error, error.line, options.debug)
        return error.exit_code
    except KeyboardInterrupt:
        write_line(sys.stderr, "interrupted")
        return 130
    except BrokenPipeError:
        discard_stdout()
        return 0
    except Exception as error:
        text = f"meshwright failed by a fault of its own: {type(error).__name__}: {error}"
        _say(error, text if options.debug else f"{text}\nPlease report it with what --debug prints.", options.debug)
        return 70


def _open_closed_streams() -> None:
    """Where a shell closed them (`>&-`), the next files that are opened would take their place and get our lines."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 -- as long as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _command(options: argparse.Namespace) -> int:
    match options.command:
        case "plan":
            from meshwright.cli.plan import plan

            return plan(options)
        case "train":
            from meshwright.cli.train import train

            return train(options)
        case "cluster":
            from meshwright.cli.cluster import cluster

            return cluster(options)
        case _:
            from meshwright.cli.checkpoint import checkpoint

            return checkpoint(options)


def _say(error: Exception, text: str, debug: bool) -> None:
    """Print an error once a node: under torchrun every rank may have it."""
    wait_for_first_of_node()
    if debug:
        import traceback

        traceback.print_exception(error)
    write_line(sys.stderr, text)


@final
class _Parser(argparse.ArgumentParser):
    """Refuses as the rest of the program does: with the nearest word that exists. No word is taken for a longer one."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit."""
        self.exit(2, f"error: {self.prog}: {message}. {self._nearest(message)}See {self.prog} --help.\n")

    def print_help(self, file: Any = None) -> None:
        """Print the help, to whoever still reads it."""
        try:
            print(self.format_help(), end="", file=file, flush=True)
        except BrokenPipeError:
            discard_stdout()

    def words(self) -> Iterator[str]:
        """Every command, action and flag from here down."""
        for action in self._actions:
            yield from action.option_strings
            for name, inner in (action.choices or {}).items() if isinstance(action.choices, dict) else ():
                yield name
                yield from inner.words()

    def _nearest(self, message: str) -> str:
        from meshwright.spec.nearest import closest

        known = set(self.words())
        wrong = [word.strip("',():").partition("=")[0] for word in message.split()]
        near = (closest(word, known, 0.75) for word in wrong if word not in known)
        found = next((word for word in near if word), None)
        return f"Nearest: {found}. " if found else ""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="meshwright",
        description="Plans distributed training of a PyTorch model, and runs it on any number of processes exactly as "
        "one process would.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"meshwright {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_train(commands)
    _add_cluster(commands)
    _add_checkpoint(commands)
    return parser


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="choose a layout and say why",
        description="Choose how a model is cut over a cluster, and say why: memory, moment by moment, of every layout.",
    )
    plan.add_argument("recipe", nargs="?", metavar="RECIPE.toml", help="what to train; or name --model and --cluster")
    plan.add_argument(
        "--model", metavar="M", help="a name (llama-3.1-8b), a number of parameters (7B), or a config.json"
    )
    plan.add_argument("--cluster", metavar="C", help="8xH100-SXM, 4x8xA100-80GB, a TOML file, or local")
    _add_set(plan)
    plan.add_argument("--layouts", metavar="L,L", help="look at these only, as in zero1x8,zero3x8")
    plan.add_argument("--states", metavar="NAME", help="byte recipe: textbook, zero-paper, fsdp2, fp32, ...")
    plan.add_argument("--top", type=int, default=20, metavar="N", help="candidates in the JSON document (default: 20)")
    plan.add_argument("--json", action="store_true", help="one JSON document on stdout")
    plan.add_argument("--save", metavar="F.toml", help="write a recipe of the choice, for `meshwright train`")
    _add_debug(plan)


def _add_cluster(commands: argparse._SubParsersAction[_Parser]) -> None:
    about = "the catalogue of devices, and what a cluster is made of"
    cluster = commands.add_parser("cluster", help=about, description=about.capitalize() + ".")
    actions = cluster.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (("list", "list the kinds of device"), ("show", "show a cluster: its devices and links")):
        action = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        if name == "show":
            action.add_argument("name", metavar="NAME", help="8xH100-SXM, 4x8xA100-80GB, a TOML file, or local")
        action.add_argument("--json", action="store_true", help="one JSON document on stdout")
        _add_debug(action)


def _add_set(parser: _Parser) -> None:
    text = "override keys, as in optimizer.lr=1e-3"
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=text)


def _add_train(commands: argparse._SubParsersAction[_Parser]) -> None:
    train = commands.add_parser("train", help="train a recipe", description="Train what a recipe describes.")
    train.add_argument("recipe", metavar="RECIPE.toml", help="what to train; docs/recipe.md lists every key")
    train.add_argument(
        "--nproc", type=int, metavar="N", help="processes (default: the layout's product, else one a GPU, else 1)"
    )
    train.add_argument("--run-dir", metavar="D", help="run folder (default: runs/NAME-TIME)")
    _add_set(train)
    train.add_argument("--resume", action="store_true", help="continue the newest good checkpoint of the run folder")
    _add_debug(train)


def _add_checkpoint(commands: argparse._SubParsersAction[_Parser]) -> None:
    about = "look at checkpoints, without torch"
    checkpoint = commands.add_parser("checkpoint", help=about, description=about.capitalize() + ".")
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")
    texts = {
        "ls": "list the checkpoints of a run folder, newest first",
        "show": "print what a checkpoint holds",
        "verify": "read every byte and compare it with the manifest",
        "digest": "compute weights_sha256 from the file",
        "export": "write the weights alone as one safetensors file",
    }
    for name, text in texts.items():
        action = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        action.add_argument("dir", metavar="DIR", help="a run folder (its newest good checkpoint), or one checkpoint")
        if name in ("ls", "show", "verify"):
            action.add_argument("--json", action="store_true", help="one JSON document on stdout")
        if name == "export":
            action.add_argument(
                "--output", required=True, metavar="F.safetensors", help="file to write; must not exist"
            )
        _add_debug(action)


def _add_debug(parser: _Parser) -> None:
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
