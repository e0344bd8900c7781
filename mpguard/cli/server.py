"""Run the language server: an editor shows the findings of `mpguard lint` as you type, with fixes.

The editor starts it, and communicates over stdin and stdout with the language server protocol.
docs/integrations.md has the configuration for several editors.
"""

from __future__ import annotations

import argparse
import sys

from mpguard.core.console import print_message
from mpguard.core.errors import MissingExtra

_EPILOG = """\
exit status: 0 after `shutdown` and `exit`, 1 if the editor ended without them, 2 could not start
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("--stdio", action="store_true", help="accepted for editors that pass it; stdio is always used")
    parser.add_argument(
        "--isolated", action="store_true", help="ignore all settings files and rules from third-party packages"
    )


def run(options: argparse.Namespace) -> int:
    try:
        from mpguard.server.start import start
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in ("pygls", "lsprotocol"):
            raise MissingExtra("pygls", "server", "`mpguard server`") from None
        raise
    if sys.stdin.isatty():
        print_message("waiting for an editor on stdin (see docs/integrations.md); press Ctrl-C to stop")
    return start(options.isolated)
