"""Check training code, configs and launch lines for mixed-precision mistakes.

Training code is Python and notebooks; configs are accelerate YAML, DeepSpeed JSON and axolotl
YAML; launch lines are those in shell scripts, Makefiles, GitHub workflows and READMEs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mpguard.cli import lint_adoption, lint_cache, lint_output, lint_retired, progress
from mpguard.cli.lint_options import configure, flat
from mpguard.core import settings, tracked_fs
from mpguard.core.console import print_message
from mpguard.core.errors import ConfigError, did_you_mean_file
from mpguard.lint.formats.terminal import Outcome
from mpguard.lint.model.result import FileReport
from mpguard.lint.project import tree
from mpguard.lint.source.files import READS, Target, collect, kind_of, too_deep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpguard.lint.project.launch_configs import LaunchConfig

__all__ = ["configure", "run"]


def run(options: argparse.Namespace) -> int:
    lint_output.check(options)
    lint_adoption.check(options)
    if not options.watch:
        return _once(options)
    from mpguard.cli import lint_watch

    lint_watch.check(options)
    return lint_watch.run(options, lambda: _once(options))


def _once(options: argparse.Namespace) -> int:
    collecting = gc.isenabled()
    gc.disable()  # imports create many objects and no garbage; `workers` collects where there is garbage
    try:
        with settings.isolated(options.isolated), lint_cache.recording(options):
            return _run(options)
    finally:
        if collecting:
            gc.enable()


def _run(options: argparse.Namespace) -> int:
    paths, stdin = _stdin(options)
    adoption = lint_adoption.Adoption(options)
    configs = _configs(options)
    tree.use_named(paths)
    collected = collect(paths, options.force_exclude, options.include_markdown)
    for message in (*collected.refused, *collected.empty):
        print_message(message)
    targets = (*collected.targets, *((stdin,) if stdin else ()))
    lint_retired.report_selectors(options, targets)
    reports, fixing = _reports(targets, options, configs), _fixing(options)
    lint_retired.report_suppressions(reports)
    for note in _other_programs(reports):
        print_message(note)
    trouble, failed = list(collected.refused), set[str]()
    for defect in (defect for report in reports for defect in report.defects):
        print_message(f"{defect}\n{defect.traceback.rstrip()}")
        trouble.append(str(defect))
    if fixing and not options.diff:
        written = [_write_fixed(report) for report in reports]
        failed = {report.target.path for report, problems in written if problems}
        reports, problems = [report for report, _ in written], [each for _, problems in written for each in problems]
        for problem in problems:
            print_message(problem)
        trouble += problems
    findings = [finding for report in reports for finding in report.findings]
    if options.write_baseline is not None:
        return 2 if trouble else adoption.write(findings)
    findings, left_out = adoption.narrow(findings, [target.path for target in targets])
    fixed = [report.fix_result.fixes for report in reports if report.fix_result and report.fix_result.fixes]
    checked = sum(report.recognized for report in reports)
    outcome = Outcome(findings, checked, sum(fixed), len(fixed), trouble, left_out, suppressed=options.add_noqa)
    if targets or not trouble:
        if options.diff:
            lint_output.patch(reports, outcome)
        else:
            lint_output.report(options, outcome, bool(stdin) and fixing is not None)
        if options.add_noqa:
            lint_adoption.report_unsuppressed([finding for finding in findings if finding.path not in failed])
    if trouble:
        return 2
    return 1 if (findings or (options.diff and fixed)) and not options.exit_zero else 0


def _reports(
    targets: Sequence[Target], options: argparse.Namespace, configs: tuple[LaunchConfig, ...]
) -> list[FileReport]:
    """Return a report per file. Rules are loaded only if a file has no report from an earlier run."""
    earlier = lint_cache.open_cache(options)
    known = earlier.known(targets)
    left = [target for target, report in zip(targets, known, strict=True) if report is None]
    selected = bool(options.select or options.extend_select or options.ignore)
    if left or (selected and not targets):  # an unknown code is an error in an empty folder too
        from mpguard.lint.model.rule import rules
        from mpguard.lint.model.selection import Selectors
        from mpguard.lint.run.engine import Engine, Options
        from mpguard.lint.run.workers import available

        selectors = Selectors(
            None if options.select is None else flat(options.select),
            flat(options.extend_select),
            flat(options.ignore),
            options.preview,
        )
        engine = Engine(rules(), Options(selectors, configs, options.gpu, _fixing(options)))
        with progress.bar() as on_progress:
            new = engine.run(left, options.jobs or available(), on_progress)
        earlier.add(new)
        others = iter(new)
        known = [next(others) if report is None else report for report in known]
    earlier.write()
    return [report for report in known if report is not None]


def _other_programs(reports: Sequence[FileReport]) -> Iterator[str]:
    """Yield a line for each config that was named and is of a program whose configs mpguard does not read."""
    for report in reports:
        target = report.target
        if not target.named or target.kind != "config" or target.data is not None or report.findings:
            continue
        from mpguard.document import dialects, read

        document = read(Path(target.path))
        if document.kind is None and dialects.other_program(document.data) is not None:
            yield f"{target.path}: {dialects.unread(document)}"


def _configs(options: argparse.Namespace) -> tuple[LaunchConfig, ...]:
    """Read the launch configs of `--config`. Raise for an unknown `--gpu` too."""
    if options.gpu is not None:
        from mpguard.policy.hardware import named

        named(options.gpu)
    if not options.configs:
        return ()
    from mpguard.lint.project.launch_configs import launch_config

    for name in options.configs:
        if tracked_fs.type_of(name) is None:
            raise ConfigError(f"{name}: cannot be read: no such file{did_you_mean_file(name)}")
    with tracked_fs.recording_for("--config"):
        return tuple(launch_config(Path(name), name) for name in options.configs)


def _fixing(options: argparse.Namespace) -> Literal["safe", "unsafe", "noqa"] | None:
    if options.add_noqa:
        return "noqa"
    return "unsafe" if options.unsafe_fixes else "safe" if options.fix or options.diff else None


def _stdin(options: argparse.Namespace) -> tuple[list[str], Target | None]:
    """Return the paths without `-`, and the content of stdin if `-` is one of them."""
    paths = options.paths or ["."]
    if why := too_deep(str(Path.cwd())):
        raise SystemExit(_usage(f"the current folder {why}"))
    if not all(paths):  # from "$UNSET" in a shell script, which does not mean the current folder
        raise SystemExit(_usage("one of the paths is empty; use `.` for the current folder"))
    if "-" not in paths:
        if options.stdin_filename is not None:
            raise SystemExit(_usage("--stdin-filename names the content of stdin; add `-` to the paths to read stdin"))
        return paths, None
    name = options.stdin_filename or "-"
    if why := too_deep(str(Path(name).absolute())):
        raise SystemExit(_usage(f"--stdin-filename {name}: {why}"))
    kind = kind_of(name, options.include_markdown)
    if kind is None:
        raise SystemExit(_usage(f"--stdin-filename {name}: mpguard reads {READS}"))
    data = sys.stdin.buffer.read()
    return [path for path in paths if path != "-"], Target(name, kind, named=True, size=len(data), data=data)


def _write_fixed(report: FileReport) -> tuple[FileReport, list[str]]:
    """Write a fixed file. Return its report, and why the file was not written or a fix was not applied."""
    fixed = report.fix_result
    if report.target.data is not None:
        lint_output.print_bytes(fixed.after if fixed else report.target.data)
    if fixed is None:
        return report, []
    path = report.target.path
    problems = [f"{path}:{problem}" for problem in fixed.problems]
    if report.target.data is None and fixed.after != fixed.before:
        from mpguard.core.text_edits import write_atomically

        try:
            if tracked_fs.read_regular_file(path) == fixed.before:
                write_atomically(Path(path), fixed.after)
                return report, problems
            problems = [f"{path}: was changed by another program during the check, and was not fixed. Run it again"]
        except OSError as error:
            problems = [f"{path}: cannot be written: {error.strerror or error}"]
        report = dataclasses.replace(report, findings=report.before_fixes, fix_result=None)
    return report, problems


def _usage(message: str) -> int:
    print_message(message)
    return 2
