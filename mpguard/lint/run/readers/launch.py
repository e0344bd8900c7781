"""Launch lines: of shell scripts, Makefiles, workflows, READMEs and other Markdown."""

from __future__ import annotations

from mpguard.lint.model import suppressions
from mpguard.lint.model.finding import Lines
from mpguard.lint.model.result import FileCheck
from mpguard.lint.model.rule import LaunchRule
from mpguard.lint.project import launch_lines
from mpguard.lint.run import prefilter
from mpguard.lint.run.readers.context import Context, RuleOutput, decode, not_checked
from mpguard.lint.source.files import MARKDOWN


def check(data: bytes, context: Context) -> FileCheck:
    """Check the launch lines of a file."""
    launches = launch_lines.read(data, context.path)
    if not launches:
        return not_checked(recognized=context.target.named)
    text, encode = decode(data)
    lines = Lines(text)
    has_suppressions = not context.path.lower().endswith(MARKDOWN) and suppressions.may_be_reported(data)
    comments = suppressions.in_shell(lines) if has_suppressions else suppressions.NONE
    rules = [rule for rule in context.selected(LaunchRule) if prefilter.matches(rule.triggers, data)]
    diagnostics, defects = context.run_rules(rules, launches)
    ran = set(context.selection.codes) - {defect.code for defect in defects}
    return context.finish(RuleOutput(lines, diagnostics, ran, comments, defects, encode))
