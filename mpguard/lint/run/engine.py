"""The engine: files -> gate -> facts -> rules -> findings, suppressed, ordered, and mended if asked."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import importlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mpguard.core import settings, tracked_fs
from mpguard.lint.model import suppressions
from mpguard.lint.model.finding import Finding, Lines, placed
from mpguard.lint.model.result import CONFIG, SYNTAX, Defect, FileCheck, FileReport
from mpguard.lint.model.rule import BaseRule, ConfigRule, Diagnostic, LaunchRule, Rule
from mpguard.lint.model.selection import Rules, Selection, Selectors, ignored_in, selection
from mpguard.lint.project.launch_configs import LaunchConfig
from mpguard.lint.project.project import Project
from mpguard.lint.run import prefilter, runner, timeout, workers
from mpguard.lint.source.files import MARKDOWN, Target

if TYPE_CHECKING:
    from mpguard.document import Document
    from mpguard.lint.facts.file import Facts
    from mpguard.lint.source.incremental import Trees

#: A YAML or JSON that is found and longer than this is data; no config comes near it.
LARGEST_FOUND_CONFIG = 256 << 10
#: What a file must hold to be a config of accelerate, DeepSpeed or axolotl: one of their keys.
_CONFIG_LIKE = re.compile(
    rb"(?:^|[{,])[ \t]*[\"']?(?:compute_environment|distributed_type|mixed_precision"
    rb"|(?:fp8|fsdp|deepspeed|dynamo)_config|zero_optimization|train_(?:micro_)?batch_size\w*|torch_autocast|bf16|fp16|bfloat16|float16|fp8|base_model"
    rb"|data_types)[\"']?[ \t]*:",
    re.M,
)
#: What one that does not parse must hold: a key that nothing else has, at the beginning of a line.
_BROKEN_CONFIG = re.compile(
    rb"^[ \t{]*[\"']?(?:compute_environment|distributed_type|(?:fp8|fsdp|deepspeed)_config|zero_optimization)"
    rb"[\"']?[ \t]*:",
    re.M,
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line decides. configs: launch configs; fix: which fixes to apply, or comments to add."""

    selectors: Selectors = dataclasses.field(default_factory=Selectors)
    configs: tuple[LaunchConfig, ...] = ()
    gpu: str | None = None
    fix: Literal["safe", "unsafe", "noqa"] | None = None


@dataclasses.dataclass
class _RuleOutput:
    """What was said of some content before suppressions. ran: the codes whose rules ran to the end."""

    lines: Lines
    diagnostics: list[Diagnostic]
    ran: set[str]
    comments: suppressions.Comments = suppressions.NONE
    defects: list[Defect] = dataclasses.field(default_factory=list)
    encode: Callable[[str], bytes] | None = None


class Engine:
    """Checks files, one after another. rules: all there are, by code.

    trees: set by who checks versions of the same files again and again.
    """

    def __init__(self, rules: Rules, options: Options) -> None:
        self.rules, self.options = rules, options
        self.project = Project(options.configs, options.gpu)
        self.trees: Trees | None = None
        self._selections: dict[Path | None, Selection] = {}
        self._of_python: dict[frozenset[str], tuple[type[Rule], ...]] = {}

    def run(self, targets: Iterable[Target], jobs: int = 1, told: workers.OnProgress | None = None) -> list[FileReport]:
        """Checks all targets, in up to `jobs` processes. Raises `ConfigError` before any is checked.

        told: is told how many of how many are done, now and then.
        """
        targets = list(targets)
        folders = {os.path.dirname(os.path.abspath(target.path)) for target in targets}  # noqa: PTH100, PTH120
        for folder in map(Path, folders or {"."}):
            found = settings.nearest(folder)
            self._selected(found)
            if found.configs:
                self.project.configs_for(str(folder / "any.py"))
        if jobs > 1 and len(targets) >= workers.FEW and any(target.kind == "python" for target in targets):
            importlib.import_module("mpguard.lint.facts.file")  # before the fork: 0.01 s for all, not 0.5 s for each
        return workers.run(targets, self.check, _on_crash, lambda target: target.size, jobs, on_progress=told)

    def check(self, target: Target) -> FileReport:
        """Checks one file. Never raises: what goes wrong is in the report."""
        try:
            with timeout.computing(), tracked_fs.recording_for(target.path):
                return self._check(target)
        except timeout.TimeoutExceeded:
            self.project = Project(self.options.configs, self.options.gpu)  # what was half made is of no use
            message = (
                f"parse limit: still not checked after {timeout.SECONDS} s of computing; exclude it if it is generated"
            )
            return self._unreadable(target, message)
        except Exception as error:
            return FileReport(target, defects=(runner.make_defect(target.path, "the engine", error),))

    def _check(self, target: Target) -> FileReport:
        if target.problem is not None:
            return self._unreadable(target, target.problem)
        if target.kind == "config" and not target.named and target.size > LARGEST_FOUND_CONFIG:
            tracked_fs.size(target.path)
            return FileReport(target, recognized=False, trace=tracked_fs.trace(target.path))
        try:
            data = tracked_fs.read(target.path) if target.data is None else target.data
        except OSError as error:
            return self._unreadable(target, f"the file cannot be read: {error.strerror or error}")
        checked = self.content(data, target)
        recognized, fix_result = checked.recognized, None
        if self.options.fix is None:
            trace = tracked_fs.trace(target.path) if target.data is None and not checked.defects else None
            return FileReport(target, tuple(checked.findings), tuple(checked.defects), fix_result, recognized, trace)
        from mpguard.lint.run import fixer
        from mpguard.lint.run.adoption import noqa

        # As if it were named: then the result of a fix is parsed, whether or not a rule could speak.
        check = functools.partial(self.content, target=dataclasses.replace(target, named=True))
        before_fixes = tuple(checked.findings)
        if self.options.fix == "noqa":
            fix_result, checked = noqa.add_noqa(data, checked, check, target)
        else:
            fix_result, checked = fixer.apply_fixes(data, checked, check, self.options.fix)
        return FileReport(
            target, tuple(checked.findings), tuple(checked.defects), fix_result, recognized, before_fixes=before_fixes
        )

    def content(self, data: bytes, target: Target) -> FileCheck:
        """What there is to report about some content of a file."""
        chosen = self.selection(target.path)
        self.project.begin(target.path)
        check = {
            "python": self._python,
            "config": self._config,
            "notebook": self._notebook,
            "markdown": self._markdown,
            "launch": self._launch,
        }[target.kind]
        checked = check(data, target, chosen)
        together = sorted(zip(checked.findings, checked.diagnostics, strict=True), key=lambda pair: pair[0].order)
        checked.findings, checked.diagnostics = [pair[0] for pair in together], [pair[1] for pair in together]
        return checked

    def selection(self, path: str) -> Selection:
        """The rules that are on for a file."""
        found = settings.of_file(path)
        if found.configs:  # one that has gone is said even where no rule asks for it
            self.project.configs_for(path)
        ignored = ignored_in(path, self.rules, found)
        return self._selected(found).without(ignored) if ignored else self._selected(found)

    def _selected(self, found: settings.Settings) -> Selection:
        if found.source not in self._selections:
            self._selections[found.source] = selection(self.rules, found, self.options.selectors)
        return self._selections[found.source]

    # -- Python ---------------------------------------------------------------------------------

    def _python(self, data: bytes, target: Target, chosen: Selection) -> FileCheck:
        if chosen.codes not in self._of_python:
            on = [rule for code, rule in self.rules.items() if code in chosen.codes and issubclass(rule, Rule)]
            self._of_python[chosen.codes] = tuple(on)
        speaking = [
            rule
            for rule in prefilter.relevant(data, self._of_python[chosen.codes])
            if not rule.needs_config or self.project.configs_for(target.path)
        ]
        about_dicts = self._about_dicts(data, chosen)
        judged = suppressions.may_be_judged(data)
        if not speaking and not about_dicts and not judged and not target.named and SYNTAX not in chosen.asked:
            return FileCheck(Lines(""), [], [], [])

        from mpguard.lint.source.source import Source
        from mpguard.lint.source.text import Unparsable

        diagnostics: list[Diagnostic] = []
        defects: list[Defect] = []
        ran = set(chosen.codes)
        try:
            strict = target.named or SYNTAX in chosen.asked
            parse = bool(speaking or about_dicts) or strict
            source = Source.parse(data, target.path, check_syntax=strict) if parse else Source(data, target.path)
            if speaking or about_dicts:
                from mpguard.lint.facts.file import Facts

                if self.trees is not None:
                    source.tree_of = self.trees.begin(source.path).parse
                facts = Facts(source, self.project)
                diagnostics, defects = self._ask(speaking, facts, target.path, (Unparsable,))
                try:
                    documents = self._dicts(facts) if about_dicts else []
                except Unparsable:
                    raise
                except Exception as error:
                    documents = []
                    defects += [runner.make_defect(target.path, rule.code, error, rule) for rule in about_dicts]
                for document in documents:
                    found, failed = self._ask(about_dicts, document, target.path)
                    diagnostics += found
                    defects += failed
                ran -= {defect.code for defect in defects}
                if diagnostics and not strict:  # what is said of it, is said of a program
                    source.check_syntax()
        except (Unparsable, RecursionError) as error:
            imported = getattr(error, "path", "")
            if imported and imported != target.path:
                self.project.forget(imported)
                return self._python(data, target, chosen)
            return self._unparsable(data, target, chosen, _explained(error, data, target))
        lines = Lines(source.text)
        comments = suppressions.in_python(lines) if judged or diagnostics else suppressions.NONE
        encode = functools.partial(_encoded, encoding=source.encoding, bom=source.bom)
        return self._finish(target, chosen, _RuleOutput(lines, diagnostics, ran, comments, defects, encode))

    def _about_dicts(self, data: bytes, chosen: Selection) -> list[type[BaseRule]]:
        """The config rules that could speak about a DeepSpeed config in Python code."""
        if not prefilter.may_hold_deepspeed_config(data):
            return []
        on = [
            rule
            for code, rule in self.rules.items()
            if code in chosen.codes and issubclass(rule, ConfigRule) and "deepspeed" in rule.kinds
        ]
        return prefilter.relevant(data, on)

    @staticmethod
    def _dicts(facts: Facts) -> list[Document]:
        from mpguard.lint.facts.domain.config_dicts import (
            configs,  # and PyYAML, which most runs over Python do not need
        )

        return configs(facts)

    def _unparsable(self, data: bytes, target: Target, chosen: Selection, error: Exception) -> FileCheck:
        from mpguard.lint.source.text import Unparsable

        message = error.message if isinstance(error, Unparsable) else "parse limit: the code is nested too deeply"
        line, column = (error.line, error.column) if isinstance(error, Unparsable) else (1, 1)
        lines = Lines(data.decode("utf-8", "replace").removeprefix("\ufeff"))
        line = min(max(line, 1), len(lines.starts))
        start = min(lines.offset(line, max(column, 1)), len(lines.text))
        width = 1 if lines.text[start : start + 1].strip() else 0
        found = [Diagnostic(SYNTAX, (start, start + width), message, self.rules[SYNTAX].help)]
        diagnostics = found if SYNTAX in chosen.codes else []
        comments = suppressions.in_python(lines) if b"mpguard" in data else suppressions.NONE
        return self._finish(target, chosen, _RuleOutput(lines, diagnostics, set(), comments))

    # -- Python in other files ------------------------------------------------------------------

    def _notebook(self, data: bytes, target: Target, chosen: Selection) -> FileCheck:
        """The code cells of a notebook, as one program."""
        from mpguard.lint.embedded.notebook import BrokenNotebook, Notebook

        try:
            notebook = Notebook(data)
        except BrokenNotebook as error:
            lines = Lines(data.decode("utf-8", "replace").removeprefix("\ufeff"))
            found = [Diagnostic(SYNTAX, (error.offset, error.offset), error.message, self.rules[SYNTAX].help)]
            return self._finish(target, chosen, _RuleOutput(lines, found if SYNTAX in chosen.codes else [], set()))
        if not notebook.python:
            return FileCheck(Lines(""), [], [], [], recognized=False)
        checked = self._python(notebook.program.encode("utf-8", "replace"), target, chosen)
        checked.findings = [notebook.relocated(finding) for finding in checked.findings]
        checked.edited = notebook.edited
        return checked

    def _markdown(self, data: bytes, target: Target, chosen: Selection) -> FileCheck:
        """The launch lines of a Markdown file, and its blocks of Python, each a program of its own."""
        from mpguard.lint.embedded import markdown

        found = self._launch(data, target, chosen)
        text, encode = _written(data)
        lines, inside = Lines(text), markdown.blocks(text)
        for block in inside:
            # Found, and not named: what documentation shows is often a fragment, and no rule's business.
            program = dataclasses.replace(target, kind="python", named=False)
            said = self._python(block.program.encode("utf-8", "replace"), program, chosen.without((SYNTAX,)))
            moved = [block.relocated(diagnostic) for diagnostic in said.diagnostics]
            found.diagnostics += moved
            found.findings += self._placed(moved, target, lines)
            found.defects += said.defects
        recognized = found.recognized or target.named or bool(inside)
        return FileCheck(
            lines, found.diagnostics, found.findings, found.defects, markdown.kept(inside, encode), recognized
        )

    def _launch(self, data: bytes, target: Target, chosen: Selection) -> FileCheck:
        """The launch lines of a shell script, Makefile, workflow or README."""
        from mpguard.lint.project import launch_lines

        on = [rule for code, rule in self.rules.items() if code in chosen.codes and issubclass(rule, LaunchRule)]
        speaking = [rule for rule in on if prefilter.matches(rule.triggers, data)]
        found = launch_lines.read(data, target.path)
        if not found:
            return FileCheck(Lines(""), [], [], [], recognized=target.named)
        text, encode = _written(data)
        lines = Lines(text)
        shell = not target.path.lower().endswith(MARKDOWN) and suppressions.may_be_judged(data)
        comments = suppressions.in_shell(lines) if shell else suppressions.NONE
        diagnostics, defects = self._ask(speaking, found, target.path)
        ran = set(chosen.codes) - {defect.code for defect in defects}
        return self._finish(target, chosen, _RuleOutput(lines, diagnostics, ran, comments, defects, encode))

    # -- YAML and JSON --------------------------------------------------------------------------

    def _config(self, data: bytes, target: Target, chosen: Selection) -> FileCheck:
        if not target.named and not _CONFIG_LIKE.search(data):
            return FileCheck(Lines(""), [], [], [], recognized=False)
        from mpguard import document

        read = document.decode(data, target.path)
        lines = Lines(read.text)
        kind = None if read.root is None else read.kind
        diagnostics: list[Diagnostic] = []
        defects: list[Defect] = []
        ran = set(chosen.codes)
        # Found, with problems, and no config: somebody else's YAML, with tags or templates of its own.
        broken = read.root is None and _BROKEN_CONFIG.search(data) is not None
        if read.problems and (target.named or kind is not None or broken):
            diagnostics = [
                Diagnostic(CONFIG, each.span, each.message) for each in read.problems if CONFIG in chosen.codes
            ]
        if kind is not None and isinstance(read.data, dict):
            on = [
                rule
                for code, rule in self.rules.items()
                if code in chosen.codes and issubclass(rule, ConfigRule) and kind in rule.kinds
            ]
            found, defects = self._ask(
                [rule for rule in on if prefilter.matches(rule.triggers, data)], read, target.path
            )
            diagnostics += found
            ran -= {defect.code for defect in defects}
        elif read.problems:
            ran = set()
        comments = suppressions.NONE
        if (
            read.format == "yaml"
            and (kind is not None or target.named)
            and re.search(rb"noqa|mpguard\s*:\s*i", data, re.I)
        ):
            comments = suppressions.in_yaml(lines)
        encode = None if read.root is None and read.problems else read.encoded
        checked = self._finish(target, chosen, _RuleOutput(lines, diagnostics, ran, comments, defects, encode))
        checked.recognized = target.named or kind is not None or bool(checked.findings)
        return checked

    # -- both -----------------------------------------------------------------------------------

    def _ask(
        self, rules: Iterable[type[BaseRule]], about: object, path: str, fatal: tuple[type[Exception], ...] = ()
    ) -> tuple[list[Diagnostic], list[Defect]]:
        found, defects = runner.run_rules(rules, about, self.project, path, fatal)
        return runner.most_specific(found, self.rules), defects

    def _finish(self, target: Target, chosen: Selection, said: _RuleOutput) -> FileCheck:
        lines = said.lines
        self._drop_misplaced(said, target.path)
        kept, used = suppressions.split(said.diagnostics, said.comments, lines)
        if said.ran:
            judged = suppressions.judge(said.comments, used, self.rules, said.ran, lines)
            own = [each for each in judged if each.code in chosen.codes]
            kept += suppressions.split(own, _whole_file(said.comments), lines)[0]
        findings = self._placed(kept, target, lines)
        return FileCheck(lines, kept, findings, said.defects, said.encode)

    def _drop_misplaced(self, said: _RuleOutput, path: str) -> None:
        """A rule that names a place which the file does not have is a defect, and loses what it said."""
        length = len(said.lines.text)
        for code in dict.fromkeys(each.code for each in said.diagnostics if not runner.within(each, length)):
            error = ValueError("it names a place that is not in the file")
            said.defects.append(runner.make_defect(path, code, error, self.rules[code]))
            said.ran.discard(code)
            said.diagnostics = [each for each in said.diagnostics if each.code != code]

    def _placed(self, diagnostics: list[Diagnostic], target: Target, lines: Lines) -> list[Finding]:
        others = {
            note.path: self._text_of(note.path)
            for each in diagnostics
            for note in each.notes
            if note.path is not None and note.span is not None
        }
        return [placed(each, self.rules[each.code], target.path, lines, others) for each in diagnostics]

    def _text_of(self, path: str) -> Lines:
        """The text of another file that a note points into."""
        for config in self.project.configs_for(path):
            if config.path == path:
                return Lines(config.document.text)
        from mpguard.lint.source.source import Source

        return Lines(Source(tracked_fs.read(path), path).text)

    def _unreadable(self, target: Target, problem: str) -> FileReport:
        code = CONFIG if target.kind == "config" else SYNTAX
        if code not in self.selection(target.path).codes:
            return FileReport(target)
        diagnostic = Diagnostic(code, (0, 0), problem, self.rules[code].help)
        return FileReport(target, (placed(diagnostic, self.rules[code], target.path, Lines(""), {}),))


def _explained(error: Exception, data: bytes, target: Target) -> Exception:
    """What Python says of a file of which a statement did not parse, if it refuses it too."""
    from mpguard.lint.source.source import Source
    from mpguard.lint.source.text import Unparsable

    try:
        if isinstance(error, Unparsable) and error.path:
            Source(data, target.path).check_syntax()
    except Unparsable as said:
        return said
    return error


def _whole_file(comments: suppressions.Comments) -> suppressions.Comments:
    """Only these may cover what is reported about suppressions: at its line stands the suppression itself."""
    return suppressions.Comments(
        tuple(each for each in comments.suppressions if each.lines is None and each.codes is not None)
    )


def _written(data: bytes) -> tuple[str, Callable[[str], bytes]]:
    """The text of a file that is no Python, and the way back; bytes that are not UTF-8 stay what they are."""
    bom = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    text = data[len(bom) :].decode("utf-8", "surrogateescape")
    return text, lambda new: bom + new.encode("utf-8", "surrogateescape")


def _encoded(text: str, encoding: str, bom: bool) -> bytes:
    return (b"\xef\xbb\xbf" if bom else b"") + text.encode(encoding)


def _on_crash(target: Target, how: str) -> FileReport:
    """A crash of the parser on one file (deep nesting) is that file's finding."""
    from mpguard.lint.model.rule import rules

    diagnostic = Diagnostic(SYNTAX, (0, 0), f"parse limit: the process that read this file {how}")
    return FileReport(target, (placed(diagnostic, rules()[SYNTAX], target.path, Lines(""), {}),))
