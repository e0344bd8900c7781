"""Serves editors: what `mpguard lint` reports, as you type, with actions that mend and suppress it. An editor starts it
and speaks the language server protocol with it on stdin and stdout; docs/integrations.md has the settings of some.
"""

from __future__ import annotations

import argparse
import sys

from mpguard.core.errors import MissingExtra

_EPILOG = """\
exit status: 0 after `shutdown` and `exit`, 1 where the editor is gone without, 2 could not start
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("--stdio", action="store_true", help="accepted, as many editors add it: there is no other way")
    parser.add_argument(
        "--isolated", action="store_true", help="no settings of any pyproject.toml, no rules of other distributions"
    )


def run(options: argparse.Namespace) -> int:
    try:
        from mpguard.server.start import start
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in ("pygls", "lsprotocol"):
            raise MissingExtra("pygls", "server", "`mpguard server`") from None
        raise
    if sys.stdin.isatty():
        print(
            "mpguard: this waits for an editor, which speaks on stdin (docs/integrations.md); Ctrl-C ends it",
            file=sys.stderr,
        )
    return start(options.isolated)
