"""Run accelerate's launcher, and enforce and prove the policy of an mp.yaml in every worker.

The script is not changed; its output, arguments, signals and exit status are passed through
(with several processes the exit status is that of the first rank that failed). mpguard itself
exits with 1 (the policy is not in force) or 2 (could not start), and prints the reason on a
line that begins with `mpguard:`.

Put accelerate's own flags before SCRIPT; `accelerate launch --help` lists them.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

from mpguard.core.errors import MissingExtra
from mpguard.core.watch_levels import WATCH_LEVELS


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "mpguard launch --config FILE [--enforce error|warn|off] [--allow NAME] [--emulate] "
        "[--proof-json FILE] [--watch off|light|full] [--watch-json FILE] [accelerate flags] SCRIPT [ARGS]"
    )
    parser.add_argument("--config", metavar="FILE", help="the mp.yaml to launch with")
    parser.add_argument(
        "--enforce",
        choices=("error", "warn", "off"),
        help="on a mismatch: end the run (default), print it and continue, or apply the policy without checking",
    )
    parser.add_argument(
        "--allow",
        metavar="NAME",
        action="append",
        help="a wanted deviation: local_sgd, frozen:DTYPE, fp32:PATTERN, bf16:PATTERN, states:DTYPE, "
        "idle_ranks:RANKS, ranks_differ:WHAT, loss_scaling (repeatable)",
    )
    parser.add_argument(
        "--emulate",
        action="store_true",
        help="compute the policy's FP8 in software (torchao), on any GPU or CPU: its numbers, not its speed",
    )
    parser.add_argument("--proof-json", metavar="FILE", help="rank 0 writes the proof to this file")
    parser.add_argument(
        "--watch",
        choices=WATCH_LEVELS,
        help="report NaN, skipped steps, underflow and divergence: light (default) costs less than 1 %% of a step, "
        "full checks each step before it is applied",
    )
    parser.add_argument("--watch-json", metavar="FILE", help="rank 0 writes steps and events of the watch to this file")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="training script; what follows is passed to it"
    )


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments unparsed: only accelerate's own parser can tell where the script begins."""
    if not argv or argv[0] in ("-h", "--help"):
        parser.parse_args(["--help"])
    return argparse.Namespace(argv=list(argv))


def run(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("accelerate") is None:
        raise MissingExtra("accelerate", "accelerate", "mpguard launch")
    from mpguard.runtime.launch import launcher, preflight

    preflight.check_named_config(options.argv)
    return launcher.run(options.argv)
