"""Conversion of findings to the protocol: diagnostics, hovers, and kinds of actions."""

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
    """A finding that was sent to the editor. uri: of the text, or of the notebook's cell. range: in that text."""

    uri: str
    range: types.Range
    finding: Finding

    def overlaps(self, other: types.Range) -> bool:
        """True if the finding and a range overlap or touch."""
        return _pair(self.range.start) <= _pair(other.end) and _pair(other.start) <= _pair(self.range.end)


def diagnostic(
    published: PublishedFinding, mapper: PositionMapper, locate: Callable[[PlacedNote], types.Location | None]
) -> types.Diagnostic:
    """Return the diagnostic of a finding. locate: returns the location of a note in another text or cell."""
    finding = published.finding
    lines, related = [finding.message], []
    for note in finding.notes:
        if note.start is None:
            lines.append(note.message if note.path is None else f"{note.path}: {note.message}")
            continue
        if note.path is None:
            marked = mapper.range(note.start, note.end or note.start)
            place: types.Location | None = types.Location(published.uri, marked)
        else:
            place = locate(note)
        if place is not None:
            related.append(types.DiagnosticRelatedInformation(place, note.message))
    lines += [finding.help] if finding.help else []
    url = manual_url(finding.code)
    return types.Diagnostic(
        range=published.range,
        message="\n".join(lines),
        severity=_SEVERITIES[finding.severity],
        code=finding.code,
        code_description=types.CodeDescription(url) if url else None,
        source=SOURCE,
        tags=[types.DiagnosticTag.Unnecessary] if finding.code == suppressions.UNUSED else None,
        related_information=related or None,
    )


def location(note: PlacedNote, mapper: Callable[[str], PositionMapper]) -> types.Location | None:
    """Return the location of a note in another file; None if it has none. mapper: returns the mapper of a text."""
    if note.path is None or note.start is None:
        return None
    uri = uris.from_fs_path(str(Path(note.path).absolute()))
    if uri is None:
        return None
    (line, column), (last, end) = note.start, note.end or note.start
    of_line = mapper(note.source)  # a note has only the text of its line, not of the file
    start = of_line.position((1, column)).character
    stop = of_line.position((1, end)).character if last == line else start
    return types.Location(uri, types.Range(types.Position(line - 1, start), types.Position(line - 1, max(start, stop))))


def hover(findings: Iterable[PublishedFinding], rules: Rules, markdown: bool) -> types.Hover | None:
    """Return the pages of the rules of some findings; None without findings."""
    findings = list(findings)
    codes = dict.fromkeys(each.finding.code for each in findings)
    if not codes:
        return None
    text = "\n\n---\n\n".join(rule_page.page(rules[code]) for code in codes)
    kind = types.MarkupKind.Markdown if markdown else types.MarkupKind.PlainText
    return types.Hover(types.MarkupContent(kind, text), findings[0].range)


def is_requested(kind: str, only: Iterable[str] | None) -> bool:
    """True if the editor requests a kind of action, by itself or by a kind that includes it."""
    return only is None or any(kind == each or kind.startswith(f"{each}.") for each in only)


def _pair(position: types.Position) -> tuple[int, int]:
    return position.line, position.character
