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


def most_specific(diagnostics: list[Diagnostic]) -> list[Diagnostic]:
    """Drop diagnostics where a rule, or a form, that they yield to reports the same expression: one per mistake.

    Of two that yield to each other's code, or to their own, neither is dropped because of the other.
    """
    spans: dict[tuple[str, tuple[str, ...]], list[tuple[int, int]]] = {}
    for each in diagnostics:
        spans.setdefault((each.code, each.yields_to), []).append(each.span)
    starts, ends = {}, {}
    for key, found in spans.items():
        found.sort()
        starts[key] = [start for start, _ in found]
        ends[key] = list(itertools.accumulate((end for _, end in found), max))

    def is_dropped(diagnostic: Diagnostic) -> bool:
        for key in spans:
            if key[0] in diagnostic.yields_to and diagnostic.code not in key[1]:
                before = bisect.bisect_left(starts[key], diagnostic.span[1])
                if before > 0 and ends[key][before - 1] > diagnostic.span[0]:  # the furthest end of those before it
                    return True
        return False

    return [each for each in diagnostics if not is_dropped(each)]


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
