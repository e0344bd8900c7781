"""The command line: one module per command, each with `configure(parser)` and `run(options) -> int`.

Exit status: 0 clean or done, 1 findings or not in force, 2 could not run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from mpguard.cli.said import say
from mpguard.errors import MpguardError, NotInForce, did_you_mean, near

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
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((a for a in arguments if not a.startswith("-")), None)
    leading = arguments[: arguments.index(command)] if command is not None else arguments
    if "--version" in leading or "-V" in leading:
        from mpguard import __version__

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
    try:
        parse = getattr(module, "parse_arguments", None)  # `launch` leaves it to accelerate's parser
        options = parse(parser, arguments[1:]) if parse else _parsed(parser, arguments[1:])
        status: int = module.run(options)
        return status
    except SystemExit as error:  # argparse
        return error.code if isinstance(error.code, int) else 2
    except NotInForce as error:
        print(f"mpguard: not in force: {error}", file=sys.stderr)
        return 1
    except MpguardError as error:
        return _refuse(str(error))
    except BrokenPipeError:
        sys.stderr.close()
        return 2
    except KeyboardInterrupt:
        return 130


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options, or an error that names the near ones."""
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            parser.error(f"`{name}` is one argument too many")
        known = near(name, [option for action in parser._actions for option in action.option_strings])
        hint = f"did you mean {' or '.join(f'`{option}`' for option in known)}?" if known else "--help lists them"
        parser.error(f"there is no option `{name}`; {hint}")
    return options


def _refuse(message: str) -> int:
    say(message)
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
