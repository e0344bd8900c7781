"""The command line: one module per command, each with `configure(parser)` and `run(options) -> int`.

Exit status: 0 clean or done, 1 findings or not in force, 2 could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpguard.core.console import print_message
from mpguard.core.errors import MpguardError, NotInForce, did_you_mean, near

#: What a write to a full disk, or one that fails, says.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
#: Command -> what it does. Its module is imported only when it runs.
COMMANDS = {
    "lint": "check training code and configs",
    "rule": "the manual page of a rule",
    "recipes": "list precision recipes; show what one becomes in a framework",
    "init": "write an mp.yaml from a recipe",
    "apply": "write a recipe into existing configs",
    "launch": "accelerate launch, with the policy in force and proven",
    "server": "check what is open in an editor, as you type",
    "completion": "a script that completes all this in bash, zsh or fish",
    "hook": "let `accelerate launch --config mp.yaml` work",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status. Never raises for what is the user's to mend."""
    _open_streams()
    try:
        os.getcwd()  # noqa: PTH109
    except OSError as error:
        return _refuse(f"the current folder is gone, or cannot be entered: {error.strerror}")
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, where a reader that is gone can be handled
        return status
    except SystemExit as error:  # argparse
        return error.code if isinstance(error.code, int) else 2
    except NotInForce as error:
        print(f"mpguard: not in force: {error}", file=sys.stderr)
        return 1
    except MpguardError as error:
        return _refuse(str(error))
    except BrokenPipeError:  # `| head`
        _drop_output()
        return 2
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _drop_output()
        return _refuse(f"the output cannot be written: {error.strerror}")
    except KeyboardInterrupt:
        return 130


def _open_streams() -> None:
    """Those that the shell has closed (`>&-`) are None in Python."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def _drop_output() -> None:
    """What is still buffered must not fail again when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:  # as git has it
        arguments = [*arguments[1:2], "--help"]
    command = next((a for a in arguments if not a.startswith("-")), None)
    leading = arguments[: arguments.index(command)] if command is not None else arguments
    if "--version" in leading or "-V" in leading:
        from mpguard.core.version import __version__

        print(f"mpguard {__version__}")
        return 0
    if command is None or "-h" in leading or "--help" in leading:
        print(_overview())
        return 0 if leading else 2
    if leading:
        return _refuse(f"there is no option `{leading[0]}` before the command")
    if command not in COMMANDS:
        return _refuse(f"there is no command `{command}`{did_you_mean(command, COMMANDS)}")
    module = importlib.import_module(f"mpguard.cli.{command}")
    parser = argparse.ArgumentParser(
        prog=f"mpguard {command}",
        description=(module.__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    parse = getattr(module, "parse_arguments", None)  # `launch` leaves it to accelerate's parser
    options = parse(parser, arguments[1:]) if parse else _parsed(parser, arguments[1:])
    status: int = module.run(options)
    return status


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options, or an error that names the near ones. Options may stand between and behind what has no name."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for argument in arguments[:end]:
        if argument.startswith("--") and argument.endswith("=--"):  # argparse makes a list of it
            parser.error(f"`--` is no value for `{argument.removesuffix('=--')}`")
    # Behind `--` nothing is an option: NUL, which no argument can have, keeps argparse from seeing one there.
    behind = (f"\0{each}" if each.startswith("-") and each != "--" else each for each in arguments[end:])
    options, unknown = parser.parse_known_intermixed_args([*arguments[:end], *behind])
    vars(options).update({name: _unmarked(value) for name, value in vars(options).items()})
    unknown = _unmarked(unknown)
    if unknown:
        name = next((each for each in unknown if each.startswith("-") and each != "-"), unknown[0]).partition("=")[0]
        if not name.startswith("-"):
            parser.error(f"`{name}` is one argument too many")
        known = near(name, [option for action in parser._actions for option in action.option_strings])
        hint = f"did you mean {' or '.join(f'`{option}`' for option in known)}?" if known else "--help lists them"
        parser.error(f"there is no option `{name}`; {hint}")
    for action in parser._actions:
        value = getattr(options, action.dest, None)
        if action.option_strings and (value == "" or (isinstance(value, list) and "" in value)):
            parser.error(f"`{action.option_strings[-1]}` is given nothing")  # "$UNSET" of a shell script
    return options


def _unmarked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmarked(each) for each in value]
    return type(value)(str(value).removeprefix("\0")) if isinstance(value, (str, Path)) else value


def _refuse(message: str) -> int:
    print_message(message)
    return 2


def _overview() -> str:
    lines = [
        "usage: mpguard COMMAND ...",
        "",
        "Mixed precision said once, in force everywhere, and proven.",
        "",
        "commands:",
    ]
    lines += [f"  {name:12}{text}" for name, text in COMMANDS.items()]
    lines += ["", "mpguard COMMAND --help says more; mpguard --version the version.",
              "Exit status: 0 clean or done, 1 findings or not in force, 2 could not run."]  # fmt: skip
    return "\n".join(lines)
