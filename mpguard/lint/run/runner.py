"""Runs rules, and reports the ones that fail, or yield what cannot be reported, as defects."""

from __future__ import annotations

import bisect
import functools
import itertools
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from mpguard.lint.facts.file import Facts
from mpguard.lint.model.result import Defect
from mpguard.lint.model.rule import BaseRule, ConfigRule, Diagnostic, LaunchRule
from mpguard.lint.model.selection import Rules

if TYPE_CHECKING:
    from mpguard.lint.project.project import Project
    from mpguard.lint.project.requirements import Required


def run_rules(
    rules: Iterable[type[BaseRule]],
    subject: object,
    project: Project,
    path: str,
    fatal: tuple[type[Exception], ...] = (),
) -> tuple[list[Diagnostic], list[Defect]]:
    """Run rules on a subject (facts, a document, launch lines). One that fails is a defect; the others still run.

    fatal: errors that no rule causes; they are raised.
    """
    diagnostics: list[Diagnostic] = []
    defects: list[Defect] = []
    required = subject.required if isinstance(subject, Facts) else functools.partial(project.required, path)
    for rule in rules:
        try:
            instance = rule(project) if issubclass(rule, (ConfigRule, LaunchRule)) else rule()
            yielded = dict.fromkeys(instance.check(subject))  # type: ignore[attr-defined]
            _require_diagnostics(yielded, rule)
            about = [each for each in yielded if not _is_about_other_versions(each, required)]
        except fatal:
            raise
        except (Exception, SystemExit) as error:
            defects.append(make_defect(path, rule.code, error, rule))
            continue
        diagnostics += about
    return diagnostics, defects


def _is_about_other_versions(diagnostic: Diagnostic, required: Callable[[str], Required]) -> bool:
    """True if the project or the code requires versions of a library for which a finding is not true."""
    return any(required(library).excludes(versions) for library, versions in diagnostic.versions)


def _require_diagnostics(yielded: Iterable[object], rule: type[BaseRule]) -> None:
    """Raise `TypeError` if a rule yields what the engine cannot report."""
    for each in yielded:
        if not isinstance(each, Diagnostic) or each.code != rule.code:
            raise TypeError(f"`check` yields {each!r}; a `Diagnostic` with the code {rule.code} is needed")


def most_specific(diagnostics: list[Diagnostic], rules: Rules) -> list[Diagnostic]:
    """Drop a rule's diagnostics where a rule that it yields to reports the same expression: one finding per mistake."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for each in diagnostics:
        spans.setdefault(each.code, []).append(each.span)
    starts, ends = {}, {}
    for code, found in spans.items():
        found.sort()
        starts[code] = [start for start, _ in found]
        ends[code] = list(itertools.accumulate((end for _, end in found), max))

    def overlapped(code: str, span: tuple[int, int]) -> bool:
        before = bisect.bisect_left(starts[code], span[1]) if code in starts else 0  # the furthest end of those
        return before > 0 and ends[code][before - 1] > span[0]

    return [each for each in diagnostics if not any(overlapped(code, each.span) for code in rules[each.code].yields_to)]


def within(diagnostic: Diagnostic, length: int) -> bool:
    """True if all places of a diagnostic are in a text of this length."""
    spans = [diagnostic.span, *(note.span for note in diagnostic.notes if note.span and note.path is None)]
    if diagnostic.fix is not None:
        spans += [(edit.start, edit.end) for edit in diagnostic.fix.edits]
    return all(0 <= start <= end <= length for start, end in spans)


def make_defect(path: str, code: str, error: BaseException, rule: type[BaseRule] | None = None) -> Defect:
    """Return the defect of an error in a rule, or in the engine."""
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    module = "" if rule is None or rule.__module__.startswith("mpguard.") else rule.__module__
    return Defect(path, code, message, "".join(traceback.format_exception(error)), module)
