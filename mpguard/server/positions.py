"""Positions and edits in the units of the protocol: lines from 0, columns in the code units that the editor counts.

pygls splits lines like `str.splitlines`, which also splits at form feeds and U+2028; editors and mpguard do not. So
lines are those of `Lines`, also where pygls applies a change of the editor to its copy of a text.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence

from lsprotocol import types
from pygls.workspace import PositionCodec, TextDocument, Workspace

from mpguard.lint.model.finding import Lines, Position

#: Texts with more lines than this are not compared line by line.
MAX_DIFF_LINES = 5000


class BufferText(TextDocument):
    """A document of pygls with the line ends of the editor."""

    @property
    def lines(self) -> Sequence[str]:
        return tuple(_split(self.source))


class Buffers(Workspace):
    """The workspace of pygls, with `BufferText` documents."""

    @classmethod
    def of(cls, workspace: Workspace) -> Buffers:
        kind, folders = types.TextDocumentSyncKind.Incremental, list(workspace.folders.values())
        return cls(workspace.root_uri, kind, folders, workspace.position_encoding)

    def _create_text_document(
        self, doc_uri: str, source: str | None = None, version: int | None = None, language_id: str | None = None
    ) -> TextDocument:
        return BufferText(doc_uri, source or "", version, language_id, position_codec=self.position_codec)


@dataclasses.dataclass(frozen=True)
class PositionMapper:
    """Converts positions in one text. codec: counts the editor's units. prefix: a byte order mark before the text."""

    lines: Lines
    codec: PositionCodec
    prefix: str = ""

    def position(self, at: Position) -> types.Position:
        line, column = at
        before = self.lines.line(line)[: column - 1]
        return types.Position(line - 1, self.codec.client_num_units(self.prefix + before if line == 1 else before))

    def range(self, start: Position, end: Position) -> types.Range:
        return types.Range(self.position(start), self.position(max(start, end)))

    def edits(self, after: str) -> list[types.TextEdit]:
        """Return the smallest edits per block of changed lines that turn this text into another."""
        before = self.lines.text
        old, new = _split(before), _split(after)
        starts = [*self.lines.starts, len(before)]
        edits: list[types.TextEdit] = []
        for first, last, low, high in _changes(old, new):
            text = "".join(new[low:high])
            start, end = starts[first], starts[last]
            same = _common_prefix(before[start:end], text)
            start, text = start + same, text[same:]
            same = _common_prefix(before[start:end][::-1], text[::-1])
            end, text = end - same, text[: len(text) - same]
            changed = types.Range(*(self.position(self.lines.position(offset)) for offset in (start, end)))
            edits.append(types.TextEdit(changed, text))
        return edits


def _changes(old: list[str], new: list[str]) -> list[tuple[int, int, int, int]]:
    """Return which lines become which lines; in a long text all of them, as comparing would take seconds."""
    if max(len(old), len(new)) > MAX_DIFF_LINES:
        return [(0, len(old), 0, len(new))]
    codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [(first, last, low, high) for what, first, last, low, high in codes if what != "equal"]


def _split(text: str) -> list[str]:
    starts = Lines(text).starts
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True) if start < end]


def _common_prefix(one: str, other: str) -> int:
    """Return the length of the common prefix; it never splits a CRLF, also in reversed texts."""
    limit = min(len(one), len(other))
    same = next((i for i in range(limit) if one[i] != other[i]), limit)
    cut = {one[same - 1 : same + 1], other[same - 1 : same + 1]} if same else set()
    return same - 1 if cut & {"\r\n", "\n\r"} else same
