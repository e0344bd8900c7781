"""The options of `mpguard lint`, in groups, and what each accepts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from mpguard.core.errors import did_you_mean
from mpguard.lint.formats.terminal import FORMATS

_EPILOG = """\
examples:
  mpguard lint                                  this folder
  mpguard lint train.py --config mp.yaml        a script against the config that it is launched with
  mpguard lint --fix --diff src                 what the safe fixes would change
  mpguard lint --select MPG2,MPG4 --statistics  how much there is about loss scaling and FP8
  mpguard lint --diff-from main...              what this branch brings
  mpguard lint --format sarif --output-file mpguard.sarif .
  mpguard lint --watch src                      again whenever a file changes
  mpguard rule MPG201                           what a finding means

Suppress a finding with `# noqa: MPG201` or `# mpguard: ignore[MPG201] why` on its line; settings are
[tool.mpguard] in pyproject.toml.

exit status:
  0  nothing found, or --exit-zero; with --fix, nothing left; with --watch, ended by Ctrl-C
  1  findings; with --diff, something to change
  2  could not run: a path that cannot be opened or written, bad settings or options, a rule that fails
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [OPTION ...] [PATH ...]"
    parser.epilog = _EPILOG
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="files and folders; `-` is stdin (default: this folder)"
    )
    _rules(
        parser.add_argument_group("which rules", "CODE is a code (MPG201), a prefix (MPG2) or ALL; several with commas")
    )
    _files(parser.add_argument_group("which files, and what goes with them"))
    _fixes(parser.add_argument_group("fixes"))
    _adoption(parser.add_argument_group("taking it up in an old project"))
    _output(parser.add_argument_group("output"))
    _running(parser.add_argument_group("running"))


def flat(given: Iterable[tuple[str, ...]] | None) -> tuple[str, ...]:
    """The codes of an option that may be given several times."""
    return tuple(code for codes in given or () for code in codes)


def _rules(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--select", action="append", type=_codes, metavar="CODE,...", help="these rules instead of the default ones"
    )
    group.add_argument("--extend-select", action="append", type=_codes, metavar="CODE,...", help="these rules too")
    group.add_argument("--ignore", action="append", type=_codes, metavar="CODE,...", help="not these rules")
    group.add_argument("--preview", action="store_true", help="let prefixes and ALL select preview rules too")


def _files(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        dest="configs",
        help="a launch config to check the code against, instead of those beside it (repeatable)",
    )
    group.add_argument("--gpu", metavar="NAME", help="what the code will run on: a name (h100) or a capability (sm_90)")
    group.add_argument("--stdin-filename", metavar="NAME", help="the name that stdin is reported and checked under")
    group.add_argument(
        "--include-markdown",
        action="store_true",
        help="check the blocks of Python in Markdown files too, each as a program of its own",
    )
    group.add_argument(
        "--force-exclude",
        action="store_true",
        help="treat files that are named like found ones: `exclude` holds for them too (for pre-commit)",
    )


def _fixes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--fix", action="store_true", help="apply safe fixes; what is left is reported")
    group.add_argument("--unsafe-fixes", action="store_true", help="apply unsafe ones too (implies --fix)")
    group.add_argument("--diff", action="store_true", help="print what the fixes would change (for patch -p0)")


def _adoption(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--baseline", metavar="FILE", help="leave out the findings that FILE knows, wherever they have moved to"
    )
    group.add_argument("--write-baseline", metavar="FILE", help="write all findings there, as known from now on")
    group.add_argument(
        "--diff-from",
        metavar="REV",
        help="only what lines changed since a git revision bring; `main...`: since branching",
    )
    group.add_argument(
        "--add-noqa", action="store_true", help="suppress all findings with `# noqa: CODE` comments (see first: --diff)"
    )


def _output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--format", type=_format, default="full", metavar="|".join(FORMATS), help="default: full")
    group.add_argument(
        "--output-file",
        type=lambda name: None if name == "-" else name,
        metavar="FILE",
        help="write the report there, and only a summary to stderr",
    )
    group.add_argument("--statistics", action="store_true", help="how often each rule spoke, instead of the findings")
    group.add_argument("--exit-zero", action="store_true", help="exit with 0 where there are findings")


def _running(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--watch", action="store_true", help="report again whenever a file changes, until Ctrl-C (needs mpguard[watch])"
    )
    group.add_argument(
        "--isolated", action="store_true", help="no settings of any pyproject.toml, no rules of other distributions"
    )
    group.add_argument("-j", "--jobs", type=_jobs, metavar="N", help="processes (default: as many as there are cores)")
    group.add_argument("--no-cache", action="store_true", help="neither use nor keep findings between runs")


def _codes(text: str) -> tuple[str, ...]:
    codes = tuple(part.strip().upper() for part in text.split(",") if part.strip())
    if not codes:
        raise argparse.ArgumentTypeError("no code is named; MPG201, MPG2 or ALL are needed, several with commas")
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
        raise argparse.ArgumentTypeError(f"{text} is no number of processes; 1 or more is needed")
    return jobs
