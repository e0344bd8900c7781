"""The options of `mpguard lint`, in groups, and the values that each accepts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from mpguard.core.errors import did_you_mean
from mpguard.lint.formats.terminal import FORMATS

_EPILOG = """\
examples:
  mpguard lint                                  check the current folder
  mpguard lint train.py --config mp.yaml        check a script against its launch config
  mpguard lint --fix --diff src                 show what the safe fixes would change
  mpguard lint --select MPG2,MPG4 --statistics  count findings about loss scaling and FP8
  mpguard lint --diff-from main...              report what this branch adds
  mpguard lint --format sarif --output-file mpguard.sarif .
  mpguard lint --watch src                      check again whenever a file changes
  mpguard rule MPG201                           explain a finding

Suppress a finding with `# noqa: MPG201` or `# mpguard: ignore[MPG201] reason` on its line.
Settings are read from [tool.mpguard] in pyproject.toml, or from mpguard.toml.

exit status:
  0  no findings, or --exit-zero; with --fix, none left; with --watch, ended by Ctrl-C
  1  findings; with --diff, changes to make
  2  could not run: an unreadable or unwritable path, invalid settings or options, a rule that fails
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [OPTION ...] [PATH ...]"
    parser.epilog = _EPILOG
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="files and folders to check; `-` reads stdin (default: .)"
    )
    _rules(
        parser.add_argument_group(
            "rule selection", "CODE is a rule code (MPG201), a prefix (MPG2) or ALL; separate several with commas."
        )
    )
    _files(parser.add_argument_group("file selection and context"))
    _fixes(parser.add_argument_group("fixes"))
    _adoption(parser.add_argument_group("adoption in an existing project"))
    _output(parser.add_argument_group("output"))
    _running(parser.add_argument_group("execution"))


def flat(given: Iterable[tuple[str, ...]] | None) -> tuple[str, ...]:
    """Return the codes of an option that may be given several times."""
    return tuple(code for codes in given or () for code in codes)


def _rules(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--select",
        action="append",
        type=_codes,
        metavar="CODE,...",
        help="enable only these rules, instead of the default ones",
    )
    group.add_argument(
        "--extend-select", action="append", type=_codes, metavar="CODE,...", help="also enable these rules"
    )
    group.add_argument("--ignore", action="append", type=_codes, metavar="CODE,...", help="disable these rules")
    group.add_argument("--preview", action="store_true", help="let prefixes and ALL select preview rules as well")


def _files(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        dest="configs",
        help="check the code against this launch config, instead of the configs in its folder (repeatable)",
    )
    group.add_argument(
        "--gpu", metavar="NAME", help="the GPU that the code runs on: a name (h100) or a capability (sm_90)"
    )
    group.add_argument("--stdin-filename", metavar="NAME", help="check and report stdin under this file name")
    group.add_argument(
        "--include-markdown",
        action="store_true",
        help="also check the Python blocks of Markdown files, each as a separate program",
    )
    group.add_argument(
        "--force-exclude",
        action="store_true",
        help="apply `exclude` to files named on the command line too (for pre-commit)",
    )


def _fixes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--fix", action="store_true", help="apply safe fixes, and report the remaining findings")
    group.add_argument("--unsafe-fixes", action="store_true", help="also apply unsafe fixes (implies --fix)")
    group.add_argument(
        "--diff", action="store_true", help="write nothing; print the fixes as a patch (for `patch -p0`)"
    )


def _adoption(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--baseline", metavar="FILE", help="leave out the findings in FILE, even if their lines have moved"
    )
    group.add_argument("--write-baseline", metavar="FILE", help="write all findings to FILE, for --baseline")
    group.add_argument(
        "--diff-from",
        metavar="REV",
        help="report only findings on lines changed since a git revision (`main...`: since the branch point)",
    )
    group.add_argument(
        "--add-noqa", action="store_true", help="add `# noqa: CODE` comments for all findings (--diff shows them first)"
    )


def _output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--format", type=_format, default="full", metavar="|".join(FORMATS), help="output format (default: full)"
    )
    group.add_argument(
        "--output-file",
        type=lambda name: None if name == "-" else name,
        metavar="FILE",
        help="write the report to FILE, and a summary to stderr",
    )
    group.add_argument(
        "--statistics", action="store_true", help="print the number of findings per rule instead of the findings"
    )
    group.add_argument("--exit-zero", action="store_true", help="exit with 0 even if there are findings")


def _running(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--watch", action="store_true", help="check again whenever a file changes, until Ctrl-C (needs mpguard[watch])"
    )
    group.add_argument(
        "--isolated", action="store_true", help="ignore all settings files and rules from third-party packages"
    )
    group.add_argument("-j", "--jobs", type=_jobs, metavar="N", help="number of processes (default: one per core)")
    group.add_argument("--no-cache", action="store_true", help="neither read nor write the cache")


def _codes(text: str) -> tuple[str, ...]:
    codes = tuple(part.strip().upper() for part in text.split(",") if part.strip())
    if not codes:
        raise argparse.ArgumentTypeError("no code is given; a code (MPG201), a prefix (MPG2) or ALL is needed")
    return codes


def _format(text: str) -> str:
    if text not in FORMATS:
        raise argparse.ArgumentTypeError(f"there is no format `{text}`{did_you_mean(text, FORMATS)}")
    return text


def _jobs(text: str) -> int:
    try:
        jobs = int(text)
    except ValueError:
        jobs = 0
    if jobs < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of processes; 1 or more is needed")
    return jobs
