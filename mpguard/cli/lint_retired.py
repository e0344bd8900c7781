"""Messages about retired codes: in selectors of the command line and of settings, in suppressions and in baselines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mpguard.cli.lint_options import flat
from mpguard.core import settings
from mpguard.core.console import print_message
from mpguard.lint.model.retired import RETIRED, explanation

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from mpguard.lint.model.result import FileReport
    from mpguard.lint.source.files import Target

#: Characters of a prefix that is longer than that of a group: it may cover retired codes alone.
_LONG = len("MPG10")


def report_selectors(options: argparse.Namespace, targets: Sequence[Target]) -> None:
    """Name the retired codes that select or ignore rules, once for each place that names them."""
    _report("--select", flat(options.select or ()))
    _report("--extend-select", flat(options.extend_select))
    _report("--ignore", flat(options.ignore))
    folders = {os.path.dirname(os.path.abspath(target.path)) for target in targets}  # noqa: PTH100, PTH120
    found = {each.source: each for each in map(settings.of_folder, folders)}
    for source, each in found.items():
        per_file = (selector for selectors in each.per_file_ignores.values() for selector in selectors)
        _report(str(source), (*(each.select or ()), *each.extend_select, *each.ignore, *per_file))


def report_suppressions(reports: Iterable[FileReport]) -> None:
    """Name the retired codes that suppressions name, once for all files."""
    files: dict[str, list[str]] = {}
    for report in reports:
        for code in report.retired:
            files.setdefault(code, []).append(report.target.path)
    for code, paths in sorted(files.items()):
        others = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
        print_message(f"{paths[0]}{others}: a suppression names a retired code: {explanation(code)}")


def report_codes(origin: str, codes: Iterable[str]) -> None:
    """Name retired codes of one origin."""
    for code in sorted(set(codes)):
        print_message(f"{origin}: {explanation(code)}")


def _report(origin: str, selectors: Iterable[str]) -> None:
    codes: set[str] = set()
    for selector in selectors:
        if selector in RETIRED:
            codes.add(selector)
        elif len(selector) >= _LONG and any(code.startswith(selector) for code in RETIRED):
            from mpguard.lint.model.rule import rules
            from mpguard.lint.model.selection import retired_by

            codes.update(retired_by(selector, rules()))
    report_codes(origin, codes)
