"""`Context`: the file, rules and project for the check of one file, and the processing of the rules' diagnostics."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from mpguard.core import tracked_fs
from mpguard.lint.model import suppressions
from mpguard.lint.model.finding import Finding, Lines, placed
from mpguard.lint.model.result import Defect, FileCheck
from mpguard.lint.model.rule import BaseRule, Diagnostic
from mpguard.lint.model.selection import Rules, Selection
from mpguard.lint.project.project import Project
from mpguard.lint.run import runner
from mpguard.lint.source.files import Target

if TYPE_CHECKING:
    from mpguard.lint.source.incremental import Trees

R = TypeVar("R", bound=BaseRule)
#: The rules of a kind that are selected, by the selected codes and the kind.
RulesByKind = dict[tuple[frozenset[str], type[BaseRule]], tuple[type[BaseRule], ...]]


@dataclasses.dataclass
class RuleOutput:
    """The diagnostics of some content before suppressions apply.

    ran: the codes whose rules ran to the end. encode: a new text as bytes; None where the content could not be read.
    is_unused: True for a diagnostic about code or a config that nothing in the project uses.
    """

    lines: Lines
    diagnostics: list[Diagnostic]
    ran: set[str]
    comments: suppressions.Comments = suppressions.NONE
    defects: list[Defect] = dataclasses.field(default_factory=list)
    encode: Callable[[str], bytes] | None = None
    is_unused: Callable[[Diagnostic], bool] | None = None


@dataclasses.dataclass(frozen=True)
class Context:
    """One file, and what its check needs.

    selection: the rules that are on for it. rules: all there are, by code.
    with_project: the file is checked as a part of its project, and not by itself.
    trees: the trees of the version before, where versions of the same file are checked one after another.
    """

    target: Target
    selection: Selection
    rules: Rules
    project: Project
    trees: Trees | None = None
    rules_by_kind: RulesByKind = dataclasses.field(default_factory=dict)
    with_project: bool = False

    @property
    def path(self) -> str:
        return self.target.path

    def is_on(self, code: str) -> bool:
        """True if the rule with this code is on for the file."""
        return code in self.selection.codes

    def selected(self, kind: type[R]) -> tuple[type[R], ...]:
        """Return the rules of a kind that are on for the file, each after its forms."""
        key = self.selection.codes, kind
        if key not in self.rules_by_kind:
            self.rules_by_kind[key] = tuple(
                each
                for code, rule in self.rules.items()
                if self.is_on(code)
                for each in (*rule.forms(), rule)
                if issubclass(each, kind)
            )
        return self.rules_by_kind[key]  # type: ignore[return-value]

    def run_rules(
        self, rules: Iterable[type[BaseRule]], subject: object, fatal: tuple[type[Exception], ...] = ()
    ) -> tuple[list[Diagnostic], list[Defect]]:
        """Run rules on a subject (facts, a document, launch lines). Raises the errors in `fatal`."""
        diagnostics, defects = runner.run_rules(rules, subject, self.project, self.path, fatal)
        return runner.most_specific(diagnostics), defects

    def finish(self, output: RuleOutput) -> FileCheck:
        """Apply suppressions, report the unused ones, and place what is left in lines and columns."""
        lines = output.lines
        self._drop_misplaced(output)
        kept, used = suppressions.split(output.diagnostics, output.comments, lines)
        if kept and self.with_project and self.project.is_copied_example(self.path):
            kept = []
        elif self.with_project and output.is_unused is not None:
            kept = [each for each in kept if not output.is_unused(each)]
        if output.ran:
            unused = suppressions.report_unused(output.comments, used, self.rules, output.ran, lines)
            about_suppressions = [each for each in unused if self.is_on(each.code)]
            kept += suppressions.split(about_suppressions, _whole_file(output.comments), lines)[0]
        return FileCheck(
            lines, kept, self.placed(kept, lines), output.defects, output.encode, retired=output.comments.retired
        )

    def _drop_misplaced(self, output: RuleOutput) -> None:
        """Report a defect for each rule that names a place outside the file, and drop its diagnostics."""
        length = len(output.lines.text)
        for code in dict.fromkeys(each.code for each in output.diagnostics if not runner.within(each, length)):
            error = ValueError("it names a place that is not in the file")
            output.defects.append(runner.make_defect(self.path, code, error, self.rules[code]))
            output.ran.discard(code)
            output.diagnostics = [each for each in output.diagnostics if each.code != code]

    def placed(self, diagnostics: Iterable[Diagnostic], lines: Lines) -> list[Finding]:
        """Return the findings of diagnostics, with lines and columns."""
        diagnostics = list(diagnostics)
        others = {
            note.path: self._text_of(note.path)
            for each in diagnostics
            for note in each.notes
            if note.path is not None and note.span is not None
        }
        return [placed(each, self.rules[each.code], self.path, lines, others) for each in diagnostics]

    def _text_of(self, path: str) -> Lines:
        """Return the text of another file that a note points into."""
        for config in self.project.configs_for(path):
            if config.path == path and (config.place is None or config.place[0] != path):
                return Lines(config.document.text)
        from mpguard.lint.source.source import Source

        return Lines(Source(tracked_fs.read(path), path).text)


_NO_LINES = Lines("")


def not_checked(recognized: bool = True) -> FileCheck:
    """Return the result of a file that no rule has to read."""
    return FileCheck(_NO_LINES, [], [], [], recognized=recognized)


def _whole_file(comments: suppressions.Comments) -> suppressions.Comments:
    """Keep the suppressions of the whole file: a finding about a suppression is on that suppression's own line."""
    return suppressions.Comments(
        tuple(each for each in comments.suppressions if each.lines is None and each.codes is not None)
    )


def replaced_text(data: bytes) -> str:
    """Decode bytes that cannot be read as what they should be: only places in them are needed."""
    return data.decode("utf-8", "replace").removeprefix("\ufeff")


def decode(data: bytes) -> tuple[str, Callable[[str], bytes]]:
    """Return the text of a file that is not Python, and a function that encodes it. Bytes that are not UTF-8 stay."""
    bom = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    text = data[len(bom) :].decode("utf-8", "surrogateescape")
    return text, lambda new: bom + new.encode("utf-8", "surrogateescape")
