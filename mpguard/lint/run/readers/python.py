"""Python code. Most files are decided on their bytes: where no rule's triggers are met, nothing is parsed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container
from typing import TYPE_CHECKING

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.core.text_edits import Span
from mpguard.lint.facts.file import Facts
from mpguard.lint.model import suppressions
from mpguard.lint.model.finding import Lines
from mpguard.lint.model.result import SYNTAX, Defect, FileCheck
from mpguard.lint.model.rule import ConfigRule, Diagnostic, Rule
from mpguard.lint.reachability import Reachability
from mpguard.lint.run import prefilter, runner
from mpguard.lint.run.readers.context import Context, RuleOutput, not_checked, replaced_text
from mpguard.lint.source.source import Source
from mpguard.lint.source.test_paths import is_test
from mpguard.lint.source.text import Unparsable

if TYPE_CHECKING:
    from mpguard.document import Document


#: A placeholder of Jinja: `{{ name }}`, `{% if x %}`; and one of a shell, outside of strings: `steps=${steps}`.
_TEMPLATE = lazy_pattern(rb"\{\{ *\w[\w.]*[^{}:]*\}\}|\{%.*%\}|[=(,\s]\$\{\w+\}")


def check(data: bytes, context: Context) -> FileCheck:
    """Check Python code."""
    try:
        return _check(data, context)
    except (Unparsable, RecursionError) as error:
        imported = getattr(error, "path", "")
        if imported and imported != context.path:
            context.project.forget(imported)
            return check(data, context)
        return _unparsable(data, context, _python_error(error, data, context.path))


def _check(data: bytes, context: Context) -> FileCheck:
    of_test = is_test(context.path, data)
    left_out = [rule for rule in context.selected(Rule) if not rule.in_tests] if of_test else []
    selected = [rule for rule in context.selected(Rule) if rule not in left_out]
    rules = [
        rule
        for rule in prefilter.relevant(data, selected, lambda: context.project.nearby(context.path, data))
        if not rule.needs_config or context.project.configs_for(context.path)
    ]
    dict_rules = [] if of_test else _rules_about_dicts(data, context)  # those of a test may be wrong on purpose
    has_suppressions = suppressions.may_be_reported(data)
    strict = context.target.named or SYNTAX in context.selection.requested
    if not rules and not dict_rules and not has_suppressions and not strict:
        return not_checked()
    if of_test and not context.target.named and context.project.is_in_copy(context.path):
        return not_checked()  # a test of another package, which this project contains and does not run

    diagnostics: list[Diagnostic] = []
    defects: list[Defect] = []
    is_unused, about_dicts = None, set[tuple[str, Span]]()
    parse = bool(rules or dict_rules) or strict
    source = Source.parse(data, context.path, check_syntax=strict) if parse else Source(data, context.path)
    if rules or dict_rules:
        if context.trees is not None:
            source.tree_of = context.trees.begin(source.path).parse
        else:
            source.tree_of = context.project.parser_of(source.path, len(data))
        facts = Facts(source, context.project)
        diagnostics, defects = context.run_rules(rules, facts, (Unparsable,))
        diagnostics = [_without_blind_fix(each, source) for each in diagnostics]
        about_training = [rule for rule in rules if not rule.in_tests]
        codes = {rule.code for rule in about_training}
        if any(each.code in codes for each in diagnostics) and facts.measures.only_measures:
            diagnostics = [each for each in diagnostics if each.code not in codes]
            left_out += about_training
        if dict_rules:
            more, failed = _check_dicts(dict_rules, facts, context)
            diagnostics += more
            defects += failed
            about_dicts = {(each.code, each.span) for each in more}
        is_unused = _Unused(facts, about_dicts).is_unused
    ran = set(context.selection.codes) - {defect.code for defect in defects} - {rule.code for rule in left_out}
    lines = Lines(source.text)
    comments = suppressions.in_python(lines) if has_suppressions or diagnostics else suppressions.NONE
    encode = functools.partial(_encoded, encoding=source.encoding, bom=source.bom)
    checked = context.finish(RuleOutput(lines, diagnostics, ran, comments, defects, encode, is_unused))
    if (diagnostics or checked.findings) and not strict:  # findings are reported for programs that Python accepts
        source.check_syntax()
    return checked


def _without_blind_fix(diagnostic: Diagnostic, source: Source) -> Diagnostic:
    """Return a diagnostic without a fix that would edit an argument which is an item of a `**mapping`."""
    edits = diagnostic.fix.edits if diagnostic.fix is not None else ()
    blind = any(source.in_mapping(edit.start, edit.end) for edit in edits)
    return dataclasses.replace(diagnostic, fix=None) if blind else diagnostic


class _Unused:
    """The code and the DeepSpeed configs of a file that nothing in its project uses.

    about_dicts: code and place of diagnostics about configs.
    """

    def __init__(self, facts: Facts, about_dicts: Container[tuple[str, Span]]) -> None:
        self._facts, self._about_dicts = facts, about_dicts
        self._reachability = facts.part(Reachability)

    def is_unused(self, diagnostic: Diagnostic) -> bool:
        about_dict = (diagnostic.code, diagnostic.span) in self._about_dicts
        if about_dict and not self._facts.project.deepspeed_config_read(self._facts.path):
            return True
        evidence = [note.span[0] for note in diagnostic.notes if note.span is not None and note.path is None]
        places = (diagnostic.span[0], *evidence)
        return not all(self._reachability.is_used(place) for place in places)


def _rules_about_dicts(data: bytes, context: Context) -> list[type[ConfigRule]]:
    """Return the config rules that may report a DeepSpeed config in Python code."""
    if not prefilter.may_hold_deepspeed_config(data):
        return []
    return prefilter.relevant(data, [rule for rule in context.selected(ConfigRule) if "deepspeed" in rule.kinds])


def _check_dicts(
    rules: list[type[ConfigRule]], facts: Facts, context: Context
) -> tuple[list[Diagnostic], list[Defect]]:
    """Run config rules on the DeepSpeed configs that are dicts in Python code."""
    diagnostics: list[Diagnostic] = []
    defects: list[Defect] = []
    try:
        documents = _config_dicts(facts)
    except Unparsable:
        raise
    except Exception as error:
        return [], [runner.make_defect(context.path, rule.code, error, rule) for rule in rules]
    for document in documents:
        more, failed = context.run_rules(rules, document)
        diagnostics += more
        defects += failed
    return diagnostics, defects


def _config_dicts(facts: Facts) -> list[Document]:
    """Return the DeepSpeed configs that are dicts in a file."""
    # This imports PyYAML, which most runs over Python do not need.
    from mpguard.lint.facts.domain.config_dicts import configs

    return configs(facts)


def _unparsable(data: bytes, context: Context, error: Exception) -> FileCheck:
    """Report that a file cannot be parsed."""
    message = error.message if isinstance(error, Unparsable) else "parse limit: the code is nested too deeply"
    line, column = (error.line, error.column) if isinstance(error, Unparsable) else (1, 1)
    if not context.target.named and _is_template(data, context.path, line):
        return not_checked()
    lines = Lines(replaced_text(data))
    line = min(max(line, 1), len(lines.starts))
    start = min(lines.offset(line, max(column, 1)), len(lines.text))
    width = 1 if lines.text[start : start + 1].strip() else 0
    diagnostic = Diagnostic(SYNTAX, (start, start + width), message, context.rules[SYNTAX].help)
    comments = suppressions.in_python(lines) if b"mpguard" in data else suppressions.NONE
    return context.finish(RuleOutput(lines, [diagnostic] if context.is_on(SYNTAX) else [], set(), comments))


def _is_template(data: bytes, path: str, line: int) -> bool:
    """True for a template of cookiecutter, Jinja or a script: a placeholder in its path, or where the error is."""
    near = b"\n".join(data.splitlines()[max(line - 2, 0) : line])
    return bool(_TEMPLATE.search(path.encode("utf-8", "surrogateescape")) or _TEMPLATE.search(near))


def _python_error(error: Exception, data: bytes, path: str) -> Exception:
    """Return Python's own syntax error, if it has one, in place of that of a statement which did not parse."""
    try:
        if isinstance(error, Unparsable) and error.path:
            Source(data, path).check_syntax()
    except Unparsable as syntax_error:
        return syntax_error
    return error


def _encoded(text: str, encoding: str, bom: bool) -> bytes:
    return (b"\xef\xbb\xbf" if bom else b"") + text.encode(encoding)
