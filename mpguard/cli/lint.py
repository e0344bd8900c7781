"""Checks training code (Python, notebooks), configs (accelerate YAML, DeepSpeed JSON, axolotl YAML), and the launch
lines of shell scripts, Makefiles, GitHub workflows and READMEs.

Exit status: 0 nothing found, 1 findings, 2 could not run (a path that cannot be opened, bad
settings, a rule that fails).
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from mpguard.edits import write_atomically
from mpguard.errors import did_you_mean
from mpguard.lint.engine import Engine, FileReport, Mended, Options
from mpguard.lint.files import READS, Target, collect, kind_of
from mpguard.lint.report import FORMATS, Line, Outcome, as_json, statistics, summary, write
from mpguard.lint.selection import Selectors


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="files and folders; `-` is stdin (default: this folder)"
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        dest="configs",
        help="a launch config to check the code against, instead of those beside it (repeatable)",
    )
    rules = parser.add_argument_group(
        "which rules", "CODE is a code (MPG201), a prefix (MPG2) or ALL; several with commas"
    )
    rules.add_argument(
        "--select", action="append", type=_codes, metavar="CODE,...", help="these rules instead of the default ones"
    )
    rules.add_argument("--extend-select", action="append", type=_codes, metavar="CODE,...", help="these rules too")
    rules.add_argument("--ignore", action="append", type=_codes, metavar="CODE,...", help="not these rules")
    rules.add_argument("--preview", action="store_true", help="let prefixes and ALL select preview rules too")
    fixes = parser.add_argument_group("fixes")
    fixes.add_argument("--fix", action="store_true", help="apply safe fixes; what is left is reported")
    fixes.add_argument("--unsafe-fixes", action="store_true", help="apply unsafe ones too (implies --fix)")
    fixes.add_argument("--diff", action="store_true", help="print what the fixes would change, and change nothing")
    output = parser.add_argument_group("output")
    output.add_argument("--format", type=_format, default="full", metavar="|".join(FORMATS), help="default: full")
    output.add_argument("--statistics", action="store_true", help="how often each rule spoke, instead of the findings")
    output.add_argument("--exit-zero", action="store_true", help="exit with 0 where there are findings")
    parser.add_argument(
        "--gpu", metavar="NAME", help="what the code will run on: a name (h100) or a capability (sm_90)"
    )
    parser.add_argument("--stdin-filename", metavar="NAME", help="the name that stdin is reported and checked under")
    parser.add_argument(
        "--include-markdown",
        action="store_true",
        help="check the blocks of Python in Markdown files too, each as a program of its own",
    )
    parser.add_argument(
        "--force-exclude",
        action="store_true",
        help="treat files that are named like found ones: `exclude` holds for them too (for pre-commit)",
    )
    parser.add_argument("-j", "--jobs", type=_jobs, metavar="N", help="processes (default: as many as there are cores)")
    parser.add_argument("--no-cache", action="store_true", help="accepted, without effect: this version keeps no cache")


def run(options: argparse.Namespace) -> int:
    from mpguard.lint.rule import rules as load
    from mpguard.lint.workers import available

    paths, stdin = _stdin(options)
    rules = load()
    engine = Engine(rules, _options(options))
    found = collect(paths, options.force_exclude, options.include_markdown)
    for message in (*found.refused, *found.empty):
        _say(message)
    targets = (*found.targets, *((stdin,) if stdin else ()))
    reports = engine.run(targets, options.jobs or available())

    trouble = bool(found.refused)
    for defect in (defect for report in reports for defect in report.defects):
        _say(f"{defect}\n{defect.traceback.rstrip()}")
        trouble = True
    if engine.options.fix and not options.diff:
        for report in reports:
            trouble = not _keep(report) or trouble
    findings = [finding for report in reports for finding in report.findings]
    fixed = [report.mended.fixes for report in reports if report.mended and report.mended.fixes]
    outcome = Outcome(findings, sum(report.ours for report in reports), sum(fixed), len(fixed))
    if targets or not trouble:
        _report(options, outcome, reports, stdin)
    if trouble:
        return 2
    return 1 if (findings or (options.diff and fixed)) and not options.exit_zero else 0


def _report(options: argparse.Namespace, outcome: Outcome, reports: list[FileReport], stdin: Target | None) -> None:
    if options.diff:
        for report in reports:
            if report.mended:
                _print_bytes(_diff(report.target.path, report.mended))
        write([_would(outcome)], sys.stderr)
        return
    stream = sys.stderr if stdin and (options.fix or options.unsafe_fixes) else sys.stdout
    formatted = FORMATS[options.format]
    if formatted is None:
        print(as_json(outcome), file=stream)
    else:
        write((statistics if options.statistics else formatted)(outcome), stream)


def _options(options: argparse.Namespace) -> Options:
    from mpguard.lint.project import launch_config

    if options.gpu is not None:
        from mpguard.hardware import named

        named(options.gpu)
    selectors = Selectors(
        None if options.select is None else _flat(options.select),
        _flat(options.extend_select),
        _flat(options.ignore),
        options.preview,
    )
    configs = tuple(launch_config(Path(name), name) for name in options.configs)
    fix: Literal["safe", "unsafe"] | None = (
        "unsafe" if options.unsafe_fixes else "safe" if options.fix or options.diff else None
    )
    return Options(selectors, configs, options.gpu, fix)


def _stdin(options: argparse.Namespace) -> tuple[list[str], Target | None]:
    """The paths without `-`, and what stands on stdin if it was asked for."""
    paths = options.paths or ["."]
    if "-" not in paths:
        if options.stdin_filename is not None:
            raise SystemExit(_usage("--stdin-filename names what is on stdin; give `-` as a path to read it"))
        return paths, None
    name = options.stdin_filename or "-"
    kind = kind_of(name, options.include_markdown)
    if kind is None:
        raise SystemExit(_usage(f"--stdin-filename {name}: mpguard reads {READS}"))
    data = sys.stdin.buffer.read()
    return [path for path in paths if path != "-"], Target(name, kind, named=True, size=len(data), data=data)


def _keep(report: FileReport) -> bool:
    """Writes a mended file. False where it could not be, or a fix was not applied; it is said why."""
    mended = report.mended
    if report.target.data is not None:
        _print_bytes(mended.after if mended else report.target.data)
    if mended is None:
        return True
    for problem in mended.problems:
        _say(f"{report.target.path}:{problem}")
    if report.target.data is None and mended.after != mended.before:
        path = Path(report.target.path)
        try:
            if path.read_bytes() != mended.before:
                _say(f"{path}: was changed by somebody else in the meantime, and is left as it is. Run it again")
                return False
            write_atomically(path, mended.after)
        except OSError as error:
            _say(f"{path}: cannot be written: {error.strerror or error}")
            return False
    return not mended.problems


def _diff(path: str, mended: Mended) -> bytes:
    before, after = (data.decode("utf-8", "surrogateescape") for data in (mended.before, mended.after))
    lines: list[str] = []
    for line in difflib.unified_diff(_lines(before), _lines(after), path, path):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines).encode("utf-8", "surrogateescape")


def _lines(text: str) -> list[str]:
    return [line for line in text.replace("\n", "\n\0").split("\0") if line]


def _would(outcome: Outcome) -> Line:
    if not outcome.fixed:
        return summary(outcome)
    files = f"{outcome.fixed_files} file{'' if outcome.fixed_files == 1 else 's'}"
    left = f"; {len(outcome.findings)} would be left" if outcome.findings else ""
    return [(f"Would fix {outcome.fixed} problem{'' if outcome.fixed == 1 else 's'} in {files}{left}.", "bold")]


def _print_bytes(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _say(message: str) -> None:
    print(f"mpguard: {message}", file=sys.stderr)


def _usage(message: str) -> int:
    _say(message)
    return 2


def _flat(given: Iterable[tuple[str, ...]] | None) -> tuple[str, ...]:
    return tuple(code for codes in given or () for code in codes)


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
