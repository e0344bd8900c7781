"""Positions and edits in the units of an editor, compared with how an editor applies them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from lsp_client import applied, marked
from lsprotocol import types
from pygls.workspace import PositionCodec

from mpguard.lint.model.finding import Lines
from mpguard.server import positions
from mpguard.server.positions import BufferText, PositionMapper

lenient = settings(max_examples=300, deadline=None)
TEXT = st.text(st.sampled_from("ab \r\n\n😀\u2028\x0cé"), max_size=40)


@lenient
@given(TEXT, TEXT)
def test_edits_turn_one_text_into_the_other(before: str, after: str) -> None:
    edits = PositionMapper(Lines(before), PositionCodec()).edits(after)
    assert applied({"a": before}, types.WorkspaceEdit({"a": edits}))["a"] == after
    if before == after:
        assert edits == []


@lenient
@given(TEXT, TEXT)
def test_edits_of_a_text_that_is_too_long_to_compare(before: str, after: str) -> None:
    limit, positions.MAX_DIFF_LINES = positions.MAX_DIFF_LINES, 0
    try:
        edits = PositionMapper(Lines(before), PositionCodec()).edits(after)
    finally:
        positions.MAX_DIFF_LINES = limit
    assert len(edits) <= 1
    assert applied({"a": before}, types.WorkspaceEdit({"a": edits}))["a"] == after


@lenient
@given(TEXT, st.data())
def test_a_change_is_applied_where_the_editor_made_it(before: str, data: st.DataObject) -> None:
    lines = Lines(before)
    offsets = [offset for offset in range(len(before) + 1) if before[offset - 1 : offset + 1] != "\r\n"]
    start, end = sorted((data.draw(st.sampled_from(offsets)), data.draw(st.sampled_from(offsets))))
    typed = data.draw(TEXT)
    at = PositionMapper(lines, PositionCodec()).range(lines.position(start), lines.position(end))
    assert marked(before, at) == before[start:end]
    document = BufferText("file:///a.py", before, 1, "python")
    document.apply_change(types.TextDocumentContentChangePartial(at, typed))
    assert document.source == before[:start] + typed + before[end:]


def test_an_edit_is_no_larger_than_what_changes() -> None:
    before = "x = 1\r\ny = 2\r\nz = 3\r\n"
    (edit,) = PositionMapper(Lines(before), PositionCodec()).edits(before.replace("2", "22"))
    assert (edit.range, edit.new_text) == (types.Range(types.Position(1, 5), types.Position(1, 5)), "2")
