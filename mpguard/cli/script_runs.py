"""What commands have in common that run a script themselves: their command line, signals, a folder for the output."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mpguard.core.errors import ConfigError


class _NotOwn(Exception):
    """An option that is the script's, or accelerate's, does not fit the command's own parser."""


def _not_own(message: str) -> NoReturn:
    raise _NotOwn(message)


def configure(
    parser: argparse.ArgumentParser, command: str, add_options: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Give the parser of a command its usage, its own options, and the script."""
    parser.usage = f"mpguard {command} --config FILE [OPTION ...] [accelerate flags] SCRIPT [ARGS]"
    add_options(parser)
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="training script; what follows is passed to it"
    )


def parsed(
    argv: list[str], command: str, add_options: Callable[[argparse.ArgumentParser], None]
) -> tuple[argparse.Namespace, list[str], int]:
    """Return the options of a command, the words for `mpguard launch`, and how many of the last are the script's.

    command: its name, for messages. add_options: adds its own options. Raises `ConfigError`.
    """
    usage = f"the command is mpguard {command} --config mp.yaml SCRIPT"

    def refuse(message: str) -> NoReturn:
        if "required: training_script" in message:
            message = f"no script is given; {usage}"
        raise ConfigError(message)

    own = argparse.ArgumentParser(add_help=False)
    own.error = _not_own  # type: ignore[method-assign]
    add_options(own)
    with contextlib.suppress(_NotOwn):
        if not own.parse_known_args(argv)[1]:  # before accelerate is imported, which takes seconds
            raise ConfigError(f"no script is given; {usage}")
    from accelerate.commands.launch import launch_command_parser

    from mpguard.runtime.launch import launcher

    parser = launch_command_parser()
    add_options(parser)
    parser.add_argument("--allow", action="append", default=None)
    parser.error = refuse
    options = parser.parse_args(argv)
    if options.config is None:
        raise ConfigError(f"no --config is given; {usage}")
    count = len(options.training_script_args)
    head, rest = argv[: len(argv) - count - 1], argv[len(argv) - count - 1 :]
    actions = [action for action in own._actions if action.dest != "config"]
    valued = [name for action in actions if action.nargs != 0 for name in action.option_strings]
    switches = [name for action in actions if action.nargs == 0 for name in action.option_strings]
    return options, [*launcher.without_options(head, valued, switches), *rest], count


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP end the measurement as Ctrl-C does. Yields the signals that have arrived."""
    received: list[int] = []

    def handler(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    former = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield received
    finally:
        for number, previous in former.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def scratch(folder: Path | None, command: str) -> Iterator[Path]:
    """Yield the folder of all runs. Raises `ConfigError` for one that has something in it."""
    if folder is None:
        yield Path(tempfile.mkdtemp(prefix=f"mpguard-{command}-"))
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--scratch {folder}: exists, and is not an empty folder. Name another one")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder.absolute()


def remove_output(folder: Path, *, keep_all: bool, keep_logs: bool) -> None:
    """Remove what the runs have written: all but their logs if one has failed."""
    if keep_all:
        return
    for path in (*folder.glob("out"), *folder.glob("*/out")) if keep_logs else (folder,):
        shutil.rmtree(path, ignore_errors=True)
