"""Runs accelerate's own launcher with the policy of an mp.yaml in force, and proven, in every worker.

    mpguard launch --config mp.yaml [accelerate flags] SCRIPT [ARGS]

The script is unchanged; its output, arguments, signals and exit status pass through (with several
processes the status is that of the first rank that failed). mpguard's own refusals are 1 (not in
force) and 2 (could not start), and say so on a line that begins with `mpguard:`.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

from mpguard.core.errors import MissingExtra


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "mpguard launch --config FILE [--enforce error|warn|off] [--proof-json FILE] [accelerate flags] SCRIPT [ARGS]"
    )
    parser.add_argument("--config", metavar="FILE", help="the mp.yaml")
    parser.add_argument("--enforce", choices=("error", "warn", "off"), help="what a mismatch does (default: error)")
    parser.add_argument("--proof-json", metavar="FILE", help="where the proof is written")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the training script, then its arguments"
    )


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Everything goes to accelerate's own parser, which alone knows where the script begins."""
    if not argv or argv[0] in ("-h", "--help"):
        parser.parse_args(["--help"])
    return argparse.Namespace(argv=list(argv))


def run(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("accelerate") is None:
        raise MissingExtra("accelerate", "accelerate", "mpguard launch")
    from mpguard.runtime.launch import launcher

    return launcher.run(options.argv)
