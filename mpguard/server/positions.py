"""Places and changes as the protocol has them: lines from 0, columns in the units that the editor counts in.

pygls splits lines where `str.splitlines` does, at form feeds and U+2028 too; editors and mpguard do not. So lines are
those of `Lines`, also where pygls applies an editor's change to its copy of a text.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence

from lsprotocol import types
from pygls.workspace import PositionCodec, TextDocument, Workspace

from mpguard.lint.model.finding import Lines, Position

#: Lines of a text that are compared one with another.
MOST_LINES = 5000


class BufferText(TextDocument):
    """A buffer whose lines are those of the editor."""

    @property
    def lines(self) -> Sequence[str]:
        return tuple(_split(self.source))


class Buffers(Workspace):
    """pygls' workspace, with texts of the class above."""

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
    """Measures one text. codec: counts in the editor's units. before: a mark that it begins with in the editor."""

    lines: Lines
    codec: PositionCodec
    before: str = ""

    def position(self, at: Position) -> types.Position:
        line, column = at
        left = self.lines.line(line)[: column - 1]
        return types.Position(line - 1, self.codec.client_num_units(self.before + left if line == 1 else left))

    def range(self, start: Position, end: Position) -> types.Range:
        return types.Range(self.position(start), self.position(max(start, end)))

    def edits(self, after: str) -> list[types.TextEdit]:
        """What makes another text of this one, leaving alone what stays the same."""
        before = self.lines.text
        old, new = _split(before), _split(after)
        starts = [*self.lines.starts, len(before)]
        changed: list[types.TextEdit] = []
        for first, last, low, high in _changes(old, new):
            text = "".join(new[low:high])
            start, end = starts[first], starts[last]
            same = _common(before[start:end], text)
            start, text = start + same, text[same:]
            same = _common(before[start:end][::-1], text[::-1])
            end, text = end - same, text[: len(text) - same]
            place = types.Range(*(self.position(self.lines.position(offset)) for offset in (start, end)))
            changed.append(types.TextEdit(place, text))
        return changed


def _changes(old: list[str], new: list[str]) -> list[tuple[int, int, int, int]]:
    """Which lines become which; in a long text, where comparing would take seconds, all between the first and last."""
    if max(len(old), len(new)) > MOST_LINES:
        return [(0, len(old), 0, len(new))]
    codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [(first, last, low, high) for what, first, last, low, high in codes if what != "equal"]


def _split(text: str) -> list[str]:
    starts = Lines(text).starts
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True) if start < end]


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike; never half of a CRLF, which may be reversed."""
    most = min(len(one), len(other))
    same = next((i for i in range(most) if one[i] != other[i]), most)
    cut = {one[same - 1 : same + 1], other[same - 1 : same + 1]} if same else set()
    return same - 1 if cut & {"\r\n", "\n\r"} else same
