"""The command line: one module per command, each with `configure(parser)` and `run(options) -> int`.

Exit status: 0 success, 1 findings or a policy that is not in force, 2 could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpguard.cli.help_texts import HelpFormatter, Parser, fitted
from mpguard.core.console import columns, print_message
from mpguard.core.errors import MpguardError, NotInForce, did_you_mean, near

#: Error numbers of a write that fails: disk full, quota exceeded, file too large, I/O error.
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
#: Command -> its summary. The module of a command is imported only when the command runs.
COMMANDS = {
    "lint": "check training code, configs and launch lines",
    "rule": "explain a rule",
    "recipes": "list the precision recipes, or show one in a framework",
    "init": "write an mp.yaml from a recipe",
    "apply": "write a recipe into existing config files",
    "doctor": "show what works on this machine, and what to do where it does not",
    "explain": "show each precision setting of a run, where it comes from, and what it overrides",
    "estimate": "estimate the memory of a run on each GPU, and what fits where",
    "compare": "compare the losses of runs with a baseline: same, different, diverged or inconclusive",
    "tune": "find the precision in which a script trains fastest here, and write it into its mp.yaml",
    "sensitivity": "measure which layer loses how much in which format, and propose a recipe per layer",
    "launch": "run `accelerate launch` with the policy enforced and proven",
    "server": "run the language server for editors",
    "completion": "print a completion script for bash, zsh or fish",
    "hook": "make `accelerate launch` enforce an mp.yaml (opt-in)",
}


#: Commands that only print what is known: a reader that has seen enough is no failure of theirs.
_LISTS = (["rule"], ["recipes"], ["completion"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Errors that the user can fix are printed, not raised."""
    _open_streams()
    try:
        os.getcwd()  # noqa: PTH109
    except OSError as error:
        return _error(f"the current folder does not exist or cannot be entered: {error.strerror}")
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # at exit, a closed pipe could no longer be handled
        if argv is None:
            gc.freeze()  # at exit, the interpreter would traverse all objects several times
        return status
    except SystemExit as error:  # argparse
        return error.code if isinstance(error.code, int) else 2
    except NotInForce as error:
        print_message(f"{error.verdict}: {error}")
        return 1
    except MpguardError as error:
        return _error(str(error))
    except BrokenPipeError:  # `| head`
        _drop_output()
        return 0 if (sys.argv[1:] if argv is None else list(argv))[:1] in _LISTS else 2
    except OSError as error:
        if error.errno not in _WRITE_ERRORS:
            raise
        _drop_output()
        return _error(f"the output cannot be written: {error.strerror}")
    except KeyboardInterrupt:
        return 130


def _open_streams() -> None:
    """Open the null device for each standard stream that the shell has closed (`>&-`): Python sets those to None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def _drop_output() -> None:
    """Redirect stdout to the null device, so that flushing its buffer at exit does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:  # `mpguard help lint`, as in git
        arguments = [*arguments[1:2], "--help"]
    command = next((a for a in arguments if not a.startswith("-")), None)
    leading = arguments[: arguments.index(command)] if command is not None else arguments
    if "--version" in leading or "-V" in leading:
        from mpguard.core.version import __version__

        print(f"mpguard {__version__}")
        return 0
    if "-h" in leading or "--help" in leading or not arguments:
        print(fitted(_overview(), columns()))
        return 0 if arguments else 2
    if command is None:
        return _error(f"there is no option `{leading[0]}`{did_you_mean(leading[0], ('--help', '--version'))}")
    if leading:
        return _error(f"there is no option `{leading[0]}` before the command")
    if command not in COMMANDS:
        return _error(f"there is no command `{command}`{did_you_mean(command, COMMANDS)}")
    module = importlib.import_module(f"mpguard.cli.{command}")
    parser = Parser(
        prog=f"mpguard {command}",
        description=(module.__doc__ or "").strip(),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    parse = getattr(module, "parse_arguments", None)  # of `launch`, which uses accelerate's parser
    options = parse(parser, arguments[1:]) if parse else _parse(parser, arguments[1:])
    status: int = module.run(options)
    return status


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options, which may come before, between and after positional arguments.

    An unknown option ends in an error that names similar ones.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for argument in arguments[:end]:
        if argument.startswith("--") and argument.endswith("=--"):  # argparse would return a list
            parser.error(f"`--` is not a valid value for `{argument.removesuffix('=--')}`")
    # After `--` nothing is an option. A NUL, which no real argument contains, keeps argparse from treating it as one.
    rest = (f"\0{each}" if each.startswith("-") and each != "--" else each for each in arguments[end:])
    options, unknown = parser.parse_known_intermixed_args([*arguments[:end], *rest])
    vars(options).update({name: _without_nul(value) for name, value in vars(options).items()})
    unknown = _without_nul(unknown)
    if unknown:
        name = next((each for each in unknown if each.startswith("-") and each != "-"), unknown[0]).partition("=")[0]
        if not name.startswith("-"):
            named = [action.option_strings[-1] for action in parser._actions if action.metavar == "NAME"]
            hint = f"; did you mean `{named[0]} {name}`?" if len(named) == 1 else ""
            parser.error(f"unexpected argument `{name}`{hint}")
        known = near(name, [option for action in parser._actions for option in action.option_strings])
        hint = f"did you mean {' or '.join(f'`{option}`' for option in known)}?" if known else "--help lists them"
        parser.error(f"there is no option `{name}`; {hint}")
    for action in parser._actions:
        value = getattr(options, action.dest, None)
        if action.option_strings and (value == "" or (isinstance(value, list) and "" in value)):
            parser.error(f"`{action.option_strings[-1]}` has an empty value")  # from "$UNSET" in a shell script
    return options


def _without_nul(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nul(each) for each in value]
    return type(value)(str(value).removeprefix("\0")) if isinstance(value, (str, Path)) else value


def _error(message: str) -> int:
    print_message(message)
    return 2


def _overview() -> str:
    lines = [
        "usage: mpguard COMMAND ...",
        "",
        "Declare mixed precision once, enforce it everywhere, prove it.",
        "",
        "commands:",
    ]
    lines += [f"  {name:13}{text}" for name, text in COMMANDS.items()]
    lines += [
        "",
        "`mpguard COMMAND --help` lists the options of a command, `mpguard --version` prints the version.",
        "Exit status: 0 success, 1 findings or a policy that is not in force, 2 could not run.",
    ]
    return "\n".join(lines)
