"""The file with the findings: one for all files of a run, written at its end.

A run reads the whole file, and replaces it: concurrent runs, and one that is killed, leave either the old or the new
file. A file of another version, or a damaged one, is ignored. It is JSON, so that a cache in a cloned repository cannot
run code.
"""

# Thousands of paths are handled here, and strings are several times faster than Path.
# ruff: noqa: PTH110

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpguard.core import tracked_fs
from mpguard.lint.model.finding import Finding, PlacedEdit, PlacedFix, PlacedNote
from mpguard.lint.model.result import FileReport
from mpguard.lint.run.cache.dependencies import Dependencies
from mpguard.lint.source.files import Target

#: Each selection of rules, set of options and working directory has a file of its own; the oldest are removed.
MOST_FILES = 16
_PREFIX = "lint-"
_KEPT = {"files": dict, "reads": list, "contents": dict}
#: The errors of reading data that this version has not written.
_DAMAGE = (AttributeError, LookupError, TypeError, ValueError)
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# A cache of mpguard; https://bford.info/cachedir/\n"


class Cache:
    """The findings of earlier runs. folder: the cache's folder; run: the digest of what all of them depend on."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder
        self.file = folder / f"{_PREFIX}{run}.json"
        kept = _loaded(self.file)
        self._files: dict[str, list[Any]] = kept["files"]
        self._reads: list[list[Any]] = kept["reads"]
        self._dependencies = Dependencies(kept["contents"])
        self._unchanged: list[bool | None] = [None] * len(self._reads)
        self._changed = False

    def _reset(self) -> None:
        """Forget everything: the file is damaged."""
        self._files, self._reads, self._dependencies, self._unchanged = {}, [], Dependencies({}), []
        self._changed = True

    def known(self, target: Target) -> FileReport | None:
        """Return the report of a file from an earlier run, if none of its dependencies has changed."""
        entry = None if target.data is not None or target.problem else self._files.get(_name(target))
        try:
            if entry is None or not all(map(self._is_unchanged, entry[1])):
                return None
            recognized, _, found, retired = entry
            findings = tuple(_finding(each, target.path) for each in found)
            return FileReport(target, findings, recognized=recognized, retired=tuple(retired))
        except _DAMAGE:
            self._reset()
            return None

    def _is_unchanged(self, index: int) -> bool:
        unchanged = self._unchanged[index]
        if unchanged is None:
            unchanged = self._unchanged[index] = self._dependencies.unchanged(*self._reads[index])
        return unchanged

    def keep(self, reports: Iterable[FileReport]) -> None:
        """Add the reports of a run."""
        numbers = {(what, where, json.dumps(seen)): index for index, (what, where, seen) in enumerate(self._reads)}
        for report in reports:
            self._changed = self._files.pop(_name(report.target), None) is not None or self._changed
            if report.trace is None:
                continue
            depends_on = []
            for (what, where), seen in report.trace.accesses.items():
                index = numbers.setdefault((what, where, json.dumps(seen)), len(self._reads))
                if index == len(self._reads):
                    self._reads.append([what, where, seen])
                depends_on.append(index)
            findings = list(map(_plain, report.findings))
            self._files[_name(report.target)] = [report.recognized, depends_on, findings, report.retired]
            for path, (status, digest) in report.trace.contents.items():
                self._dependencies.contents[path] = (*status, digest)
            self._changed = True

    @property
    def changed(self) -> bool:
        """True if there is something new to write."""
        return self._changed or self._dependencies.changed

    def write(self) -> None:
        """Replace the file if there is something new. Raises `OSError` if it cannot be written."""
        if not self.changed:
            return
        try:
            text = self._text()
        except _DAMAGE:
            self.file.unlink(missing_ok=True)
            return
        self._prepare()
        temporary = self.folder / f".{self.file.name}.{os.getpid()}"
        try:
            temporary.write_bytes(tracked_fs.digest(text).encode() + b"\n" + text)
            temporary.replace(self.file)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._clean()

    def _text(self) -> bytes:
        files = {name: entry for name, entry in self._files.items() if os.path.exists(name.partition("\0")[2])}
        used = sorted({index for entry in files.values() for index in entry[1]})
        moved = {index: place for place, index in enumerate(used)}
        reads = [self._reads[index] for index in used]
        read = {where for what, where, _ in reads if what == "file"}
        kept = {
            "files": {name: [known, [moved[i] for i in on], *rest] for name, (known, on, *rest) in files.items()},
            "reads": reads,
            "contents": {path: content for path, content in self._dependencies.contents.items() if path in read},
        }
        return json.dumps(kept, separators=(",", ":")).encode()

    def _prepare(self) -> None:
        if self.folder.is_dir():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / ".gitignore").write_text("*\n")
        (self.folder / "CACHEDIR.TAG").write_text(_TAG)

    def _clean(self) -> None:
        """Remove the oldest files, and temporary files of runs that were killed."""
        kept: list[tuple[float, Path]] = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path.name.startswith(f".{_PREFIX}") and path.stat().st_mtime < time.time() - 3600:
                    path.unlink(missing_ok=True)
                elif path.name.startswith(_PREFIX) and path.suffix == ".json":
                    kept.append((path.stat().st_mtime, path))
            for _, path in sorted(kept)[:-MOST_FILES]:
                path.unlink(missing_ok=True)


def _loaded(file: Path) -> dict[str, Any]:
    try:
        digest, _, text = file.read_bytes().partition(b"\n")
        if digest.decode() == tracked_fs.digest(text):
            kept: dict[str, Any] = json.loads(text)
            if all(isinstance(kept[name], kind) for name, kind in _KEPT.items()):
                return kept
    except (OSError, *_DAMAGE):
        pass
    return {"files": {}, "reads": [], "contents": {}}


def _name(target: Target) -> str:
    """Return the key of a file's findings: they depend on how it is read, and on whether it was named."""
    return f"{target.kind}{'!' if target.named else ''}\0{target.path}"


# -- findings as plain data ---------------------------------------------------------------------------


def _plain(finding: Finding) -> list[Any]:
    fix = finding.fix
    return [
        finding.code,
        finding.name,
        finding.severity,
        finding.line,
        finding.column,
        finding.end_line,
        finding.end_column,
        finding.message,
        finding.help,
        None if fix is None else [fix.title, fix.applicability, [[e.start, e.end, e.text, e.cell] for e in fix.edits]],
        [[note.message, note.path, note.start, note.end, note.source] for note in finding.notes],
        finding.source,
        finding.cell,
    ]


def _finding(plain: list[Any], path: str) -> Finding:
    code, name, severity, line, column, end_line, end_column, message, help, fix, notes, source, cell = plain
    return Finding(
        code,
        name,
        severity,
        path,
        line,
        column,
        end_line,
        end_column,
        message,
        help,
        None if fix is None else PlacedFix(fix[0], fix[1], tuple(map(_edit, fix[2]))),
        tuple(PlacedNote(message, at, _pair(start), _pair(end), text) for message, at, start, end, text in notes),
        tuple((number, text) for number, text in source),
        cell,
    )


def _edit(plain: list[Any]) -> PlacedEdit:
    start, end, text, cell = plain
    return PlacedEdit(tuple(start), tuple(end), text, cell)


def _pair(plain: list[int] | None) -> tuple[int, int] | None:
    return None if plain is None else (plain[0], plain[1])
