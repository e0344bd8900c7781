"""Checks what is in an editor's buffers, and makes what its actions do of them. Knows nothing of the protocol."""

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
from mpguard.lint.source.files import Kind, Target, excluded, kind_of
from mpguard.lint.source.incremental import Trees
from mpguard.server.client_settings import ClientSettings

#: What the editor calls a language -> how it is read, and the suffix of a buffer that has no name yet.
_LANGUAGES: dict[str, tuple[Kind, str]] = {
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

#: A byte order mark, as some editors leave it at the beginning of a text.
MARK = "\ufeff"

#: What an action does: a fix of one finding, a comment that suppresses one, all safe fixes.
Action = Literal["fix", "suppress", "fix-all"]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """What is open in an editor: one text, or the cells of a notebook.

    path: absolute; where it would be saved, if it is nowhere yet. language: as the editor calls it.
    folder, wishes: the workspace folder that it belongs to, and what the editor's settings ask for there.
    cells: of a notebook, each with whether it is Python; None for one text.
    """

    path: str
    language: str
    text: str
    folder: Path
    wishes: ClientSettings
    cells: tuple[tuple[str, bool], ...] | None = None

    def target(self) -> Target | None:
        """What the engine checks; None for what mpguard does not read, and for what `exclude` leaves out."""
        kind, path = self._kind()
        if kind is None or excluded(Path(path)):
            return None
        data = self._data(kind)
        return Target(path, kind, size=len(data), data=data)

    def _kind(self) -> tuple[Kind | None, str]:
        if self.cells is not None:
            return "notebook", self.path
        by_name = kind_of(self.path, self.wishes.include_markdown)
        kind, suffix = _LANGUAGES.get(self.language, (None, ""))
        if not Path(self.path).suffix and suffix:
            return kind, self.path + suffix if by_name == "python" else self.path
        if kind == "python" or by_name == "notebook":  # the JSON of a notebook: its places are those of cells
            return "python" if kind == "python" else None, self.path
        return (by_name or kind) if kind is not None or not self.language else None, self.path

    def _data(self, kind: Kind) -> bytes:
        if self.cells is not None:
            cells = [{"cell_type": "code" if python else "raw", "source": text} for text, python in self.cells]
            return json.dumps({"cells": cells, "metadata": {"language_info": {"name": "python"}}}).encode()
        return encoded(self.text, kind == "python")


@dataclasses.dataclass(frozen=True)
class BufferChange:
    """What an action makes of a buffer: its text, without `MARK`, or those of its cells; or why it cannot be done."""

    texts: tuple[str, ...] = ()
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Said:
    """What there is to say about a buffer. rests_on: the other files that were read for it, as absolute paths."""

    report: FileReport
    rests_on: frozenset[str]


class Checker:
    """Checks buffers, one after another; what lies around them is read once, until `forget`.

    Within `looks.recording()` it knows what findings rest on.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._read: set[str] = set()
        self._engines: dict[tuple[ClientSettings, Path], Engine] = {}
        self._trees = Trees()

    def forget(self) -> None:
        """Files have changed: configs, modules, settings are read again."""
        tracked_fs.clear_run_caches()
        self._engines.clear()
        self._read.clear()
        gc.unfreeze()  # much of what `jobs` took for lasting is garbage now

    def report(self, buffer: Buffer, unsaved: Mapping[str, bytes]) -> Said | None:
        """What there is to say about a buffer; None where it is none of ours. Raises `ConfigError` for settings.

        unsaved: what other files hold, where it is another content than the disk's.
        """
        target = buffer.target()
        if target is None:
            return None
        tracked_fs.overlay(unsaved)
        engine = self._engine(buffer)
        engine.selection(target.path)  # what is wrong with settings is the user's to mend, and no defect
        engine.project.configs_for(target.path)
        report, trace = engine.check(target), tracked_fs.trace(target.path)
        read = {where for what, where in (trace.looks if trace else ()) if what == "file"}
        self._read |= read
        return Said(report, frozenset(read - {target.path}))

    def changed(self, path: str) -> None:
        """What an open file holds has changed: what was made of it before is forgotten."""
        if path in self._read:
            self.forget()

    def change(self, buffer: Buffer, action: Action, finding: Finding | None = None) -> BufferChange:
        """What an action makes of a buffer. finding: the one that it is about. Raises `ConfigError` for settings."""
        target = buffer.target()
        if target is None or target.data is None:
            return BufferChange(problem="mpguard does not read this file")
        named = dataclasses.replace(target, named=True)  # then the result is parsed, whether or not a rule could speak
        engine, data = self._engine(buffer), target.data

        def check(content: bytes) -> FileCheck:
            return engine.content(content, named)

        try:
            with timeout.computing():
                checked = check(data)
                if action == "fix-all":
                    mended, _ = fixer.apply_fixes(data, checked, check, "safe")
                else:
                    at = next((i for i, each in enumerate(checked.findings) if each == finding), None)
                    if at is None:
                        return BufferChange(problem="the finding is gone")
                    diagnostic = checked.diagnostics[at]
                    if action == "fix":
                        mended = fixer.fix_one(data, checked, check, diagnostic)
                    else:
                        one = dataclasses.replace(checked, diagnostics=[diagnostic])
                        mended, _ = noqa.add_noqa(data, one, check, named)
        except timeout.TimeoutExceeded:
            self.forget()  # what was half made is of no use
            return BufferChange(problem=f"still not done after {timeout.SECONDS} s of computing")
        if mended is None or mended.after == mended.before:
            none = "no comment suppresses it here" if action == "suppress" else "there is nothing to fix"
            return BufferChange(problem="; ".join(mended.problems) if mended and mended.problems else none)
        return BufferChange(_texts(mended.after, buffer))

    def _engine(self, buffer: Buffer) -> Engine:
        key = (buffer.wishes, buffer.folder)
        if key not in self._engines:
            self._engines[key] = Engine(self.rules, buffer.wishes.options(buffer.folder))
            self._engines[key].trees = self._trees
        return self._engines[key]


def encoded(text: str, mark: bool = False) -> bytes:
    """A text as a file's bytes. mark: say that it is UTF-8, whatever its coding line says: it is decoded already."""
    bom = codecs.BOM_UTF8 if mark and not text.startswith(MARK) else b""
    return bom + text.encode("utf-8", "replace")


def _texts(data: bytes, buffer: Buffer) -> tuple[str, ...]:
    if buffer.cells is not None:
        return tuple(cell["source"] for cell in json.loads(data)["cells"])
    return (data.decode("utf-8").removeprefix(MARK),)
