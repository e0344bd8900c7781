"""Findings as the editor shows them: diagnostics, pages, and actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from lsprotocol import types
from pygls import uris

from mpguard.lint.formats.terminal import manual_url
from mpguard.lint.model import rule_page, suppressions
from mpguard.lint.model.finding import Finding, PlacedNote
from mpguard.lint.model.selection import Rules
from mpguard.server.positions import PositionMapper

SOURCE = "mpguard"
FIX_ALL = f"{types.CodeActionKind.SourceFixAll.value}.{SOURCE}"

_SEVERITIES = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
    "info": types.DiagnosticSeverity.Information,
}


@dataclasses.dataclass(frozen=True)
class PublishedFinding:
    """A finding as it was sent, and where it stands in its text. uri: of the text, or of the notebook's cell."""

    uri: str
    range: types.Range
    finding: Finding

    def touches(self, other: types.Range) -> bool:
        return _pair(self.range.start) <= _pair(other.end) and _pair(other.start) <= _pair(self.range.end)


def diagnostic(
    shown: PublishedFinding, ruler: PositionMapper, elsewhere: Callable[[PlacedNote], types.Location | None]
) -> types.Diagnostic:
    """elsewhere: where in another text, or cell, a note points to."""
    finding = shown.finding
    said, related = [finding.message], []
    for note in finding.notes:
        if note.start is None:
            said.append(note.message if note.path is None else f"{note.path}: {note.message}")
            continue
        if note.path is None:
            place: types.Location | None = types.Location(shown.uri, ruler.range(note.start, note.end or note.start))
        else:
            place = elsewhere(note)
        if place is not None:
            related.append(types.DiagnosticRelatedInformation(place, note.message))
    said += [finding.help] if finding.help else []
    url = manual_url(finding.code)
    return types.Diagnostic(
        range=shown.range,
        message="\n".join(said),
        severity=_SEVERITIES[finding.severity],
        code=finding.code,
        code_description=types.CodeDescription(url) if url else None,
        source=SOURCE,
        tags=[types.DiagnosticTag.Unnecessary] if finding.code == suppressions.UNUSED else None,
        related_information=related or None,
    )


def location(note: PlacedNote, ruler: Callable[[str], PositionMapper]) -> types.Location | None:
    """Where a note points to in another file. ruler: of a text."""
    if note.path is None or note.start is None:
        return None
    uri = uris.from_fs_path(str(Path(note.path).absolute()))
    if uri is None:
        return None
    (line, column), (last, end) = note.start, note.end or note.start
    measured = ruler(note.source)  # its line is all that there is of the file
    start = measured.position((1, column)).character
    stop = measured.position((1, end)).character if last == line else start
    return types.Location(uri, types.Range(types.Position(line - 1, start), types.Position(line - 1, max(start, stop))))


def page(shown: Iterable[PublishedFinding], rules: Rules, markdown: bool) -> types.Hover | None:
    """The manual pages of the rules that speak at a place."""
    found = list(shown)
    codes = dict.fromkeys(each.finding.code for each in found)
    if not codes:
        return None
    text = "\n\n---\n\n".join(rule_page.page(rules[code]) for code in codes)
    kind = types.MarkupKind.Markdown if markdown else types.MarkupKind.PlainText
    return types.Hover(types.MarkupContent(kind, text), found[0].range)


def wanted(kind: str, only: Iterable[str] | None) -> bool:
    """Whether the editor asks for a kind of actions; one that is named stands for those below it."""
    return only is None or any(kind == each or kind.startswith(f"{each}.") for each in only)


def _pair(position: types.Position) -> tuple[int, int]:
    return position.line, position.character
