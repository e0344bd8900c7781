"""Check the buffers of an editor and compute its actions, independent of the protocol."""

from __future__ import annotations

import codecs
import dataclasses
import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from mpguard.core import tracked_fs
from mpguard.lint.model.finding import Finding
from mpguard.lint.model.result import FileCheck, FileReport
from mpguard.lint.model.selection import Rules
from mpguard.lint.run import fixer, timeout
from mpguard.lint.run.adoption import noqa
from mpguard.lint.run.engine import Engine
from mpguard.lint.source.files import FileKind, Target, excluded, kind_of
from mpguard.lint.source.incremental import Trees
from mpguard.server.client_settings import ClientSettings

#: Language identifier of the editor -> kind of file, and the suffix of a buffer that has no file name yet.
_LANGUAGES: dict[str, tuple[FileKind, str]] = {
    "python": ("python", ".py"),
    "yaml": ("config", ".yaml"),
    "json": ("config", ".json"),
    "jsonc": ("config", ".json"),
    "github-actions-workflow": ("launch", ".sh"),
    "shellscript": ("launch", ".sh"),
    "sh": ("launch", ".sh"),
    "bash": ("launch", ".sh"),
    "make": ("launch", ".mk"),
    "makefile": ("launch", ".mk"),
    "markdown": ("launch", ".md"),
}

#: The byte order mark, which some editors keep at the beginning of a text.
BOM = "\ufeff"

#: An action fixes one finding, suppresses one with a comment, or applies all safe fixes.
Action = Literal["fix", "suppress", "fix-all"]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A document that is open in an editor: one text, or the cells of a notebook.

    path: absolute; for an unsaved document, where it would be saved. language: the editor's identifier.
    folder, settings: the workspace folder of the document, and the editor's settings for that folder.
    cells: the texts of a notebook's cells, each with True if it is Python; None for one text.
    """

    path: str
    language: str
    text: str
    folder: Path
    settings: ClientSettings
    cells: tuple[tuple[str, bool], ...] | None = None

    def target(self) -> Target | None:
        """Return the target for the engine; None for a kind of file that mpguard does not read or that is excluded."""
        kind, path = self._kind()
        if kind is None or excluded(Path(path)):
            return None
        data = self._data(kind)
        return Target(path, kind, size=len(data), data=data)

    def _kind(self) -> tuple[FileKind | None, str]:
        if self.cells is not None:
            return "notebook", self.path
        by_name = kind_of(self.path, self.settings.include_markdown)
        kind, suffix = _LANGUAGES.get(self.language, (None, ""))
        if not Path(self.path).suffix and suffix:
            return kind, self.path + suffix if by_name == "python" else self.path
        if kind == "python" or by_name == "notebook":  # a notebook opened as JSON text: findings are placed in cells
            return "python" if kind == "python" else None, self.path
        return (by_name or kind) if kind is not None or not self.language else None, self.path

    def _data(self, kind: FileKind) -> bytes:
        if self.cells is not None:
            cells = [{"cell_type": "code" if python else "raw", "source": text} for text, python in self.cells]
            return json.dumps({"cells": cells, "metadata": {"language_info": {"name": "python"}}}).encode()
        return encode(self.text, kind == "python")


@dataclasses.dataclass(frozen=True)
class BufferChange:
    """The result of an action: the text of the buffer (without `BOM`) or of its cells, or why it cannot be done."""

    texts: tuple[str, ...] = ()
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class BufferReport:
    """The report of a buffer. dependencies: the absolute paths of the other files that were read for it."""

    report: FileReport
    dependencies: frozenset[str]


class Checker:
    """Checks buffers one after another. Other files (configs, modules, settings) are read once, until `forget`.

    Inside `tracked_fs.recording()`, reports have the dependencies of their findings.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._files_read: set[str] = set()
        self._engines: dict[tuple[ClientSettings, Path], Engine] = {}
        self._trees = Trees()

    def forget(self) -> None:
        """Discard what was read from files, so that configs, modules and settings are read again."""
        tracked_fs.clear_run_caches()
        self._engines.clear()
        self._files_read.clear()
        gc.unfreeze()  # much of what `jobs` has frozen is garbage now

    def report(self, buffer: Buffer, unsaved: Mapping[str, bytes]) -> BufferReport | None:
        """Return the report of a buffer; None if mpguard does not check it. Raises `ConfigError` for settings.

        unsaved: the contents of other files that differ from those on disk.
        """
        target = buffer.target()
        if target is None:
            return None
        tracked_fs.overlay(unsaved)
        engine = self._engine(buffer)
        engine.selection(target.path)  # raises for invalid settings here, as the check itself would report a defect
        engine.project.configs_for(target.path)
        report, trace = engine.check(target), tracked_fs.trace(target.path)
        read = {where for what, where in (trace.accesses if trace else ()) if what == "file"}
        self._files_read |= read
        return BufferReport(report, frozenset(read - {target.path}))

    def file_changed(self, path: str) -> None:
        """Discard what was read from files if an open file, whose content has changed, is one of them."""
        if path in self._files_read:
            self.forget()

    def change(self, buffer: Buffer, action: Action, finding: Finding | None = None) -> BufferChange:
        """Return the result of an action. finding: the one to fix or suppress. Raises `ConfigError` for settings."""
        target = buffer.target()
        if target is None or target.data is None:
            return BufferChange(problem="mpguard does not read this file")
        named = dataclasses.replace(target, named=True)  # then the result is parsed even if no rule applies to it
        engine, data = self._engine(buffer), target.data

        def check(content: bytes) -> FileCheck:
            return engine.content(content, named)

        try:
            with timeout.computing():
                checked = check(data)
                if action == "fix-all":
                    result, _ = fixer.apply_fixes(data, checked, check, "safe")
                else:
                    index = next((i for i, each in enumerate(checked.findings) if each == finding), None)
                    if index is None:
                        return BufferChange(problem="the finding no longer exists")
                    diagnostic = checked.diagnostics[index]
                    if action == "fix":
                        result = fixer.fix_one(data, checked, check, diagnostic)
                    else:
                        one = dataclasses.replace(checked, diagnostics=[diagnostic])
                        result, _ = noqa.add_noqa(data, one, check, named)
        except timeout.TimeoutExceeded:
            self.forget()  # cached results may be incomplete
            return BufferChange(problem=f"not finished after {timeout.SECONDS} s of computing")
        if result is None or result.after == result.before:
            reason = "no comment can suppress it here" if action == "suppress" else "there is nothing to fix"
            return BufferChange(problem="; ".join(result.problems) if result and result.problems else reason)
        return BufferChange(_texts(result.after, buffer))

    def _engine(self, buffer: Buffer) -> Engine:
        key = (buffer.settings, buffer.folder)
        if key not in self._engines:
            self._engines[key] = Engine(self.rules, buffer.settings.options(buffer.folder))
            self._engines[key].trees = self._trees
        return self._engines[key]


def encode(text: str, bom: bool = False) -> bytes:
    """Return a text as UTF-8. bom: begin with a byte order mark, so that a coding line in the text is ignored."""
    prefix = codecs.BOM_UTF8 if bom and not text.startswith(BOM) else b""
    return prefix + text.encode("utf-8", "replace")


def _texts(data: bytes, buffer: Buffer) -> tuple[str, ...]:
    """Return the text of a buffer, or the texts of its cells, from the bytes that the engine checks."""
    if buffer.cells is not None:
        return tuple(cell["source"] for cell in json.loads(data)["cells"])
    return (data.decode("utf-8").removeprefix(BOM),)
