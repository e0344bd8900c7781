"""Edits that the fixes of config rules share, for config files and for dicts in Python code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpguard.core.errors import MpguardError
from mpguard.core.text_edits import Edit
from mpguard.lint.model.rule import Applicability, Fix
from mpguard.targets.inject import Change
from mpguard.targets.settings import ABSENT

if TYPE_CHECKING:
    from mpguard.document import Document, Entry
    from mpguard.document.nodes import Node, Pair


def rename_key(title: str, document: Document, entry: Entry, key: str) -> Fix:
    """Return a safe fix that renames a key and keeps its quotes."""
    start, end = entry.key_span
    source = document.text[start:end]
    quote = source[0] if source[:1] in ("'", '"') else ""
    return Fix(title, "safe", (Edit(start, end, f"{quote}{key}{quote}"),))


def set_values(
    title: str, document: Document, values: dict[str, Any], applicability: Applicability = "safe"
) -> Fix | None:
    """Return a fix that sets keys to values; `ABSENT` removes a key. None if the edit would change anything else."""
    if document.format == "python":
        return _in_python(title, document, values, applicability)
    changes = [Change(key, ABSENT, value) for key, value in values.items()]
    try:
        edits = document.edits(changes)
    except MpguardError:
        return None
    return Fix(title, applicability, edits) if edits else None


def _in_python(title: str, document: Document, values: dict[str, Any], applicability: Applicability) -> Fix | None:
    edits = [_python_edit(document, key.split("."), value) for key, value in values.items()]
    return Fix(title, applicability, tuple(edit for edit in edits if edit)) if all(edits) else None


def _added(document: Document, mapping: Node | None, path: Sequence[str], value: Any) -> Edit | None:
    """Return the edit that adds a key after the last one of a dict, on a line of its own if that one has one."""
    if mapping is None or mapping.kind != "mapping" or not mapping.pairs or value is ABSENT:
        return None
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    for name in reversed(path[1:]):
        text = f'{{"{name}": {text}}}'
    last = mapping.pairs[-1]
    line = document.text[document.text.rfind("\n", 0, last.start) + 1 : last.start]
    separator = "\n" + line if not line.strip() else " "
    return Edit(last.end, last.end, f',{separator}"{path[0]}": {text}')


def _python_edit(document: Document, path: Sequence[str], value: Any) -> Edit | None:
    """Return the edit that replaces a value by a literal, adds a key, or removes one with its comma."""
    mapping: Node | None = None
    pair: Pair | None = None
    node = document.root
    for depth, name in enumerate(path):
        pair = node.own(name) if node is not None else None
        if pair is None:
            return _added(document, node, path[depth:], value)
        mapping, node = node, pair.value
    if pair is None or mapping is None:
        return None
    if value is not ABSENT:
        text = f'"{value}"' if isinstance(value, str) else repr(value)
        return Edit(*pair.value.span, text)
    index = mapping.pairs.index(pair)
    if index + 1 < len(mapping.pairs):
        start, end = pair.start, mapping.pairs[index + 1].start
    else:
        start, end = (mapping.pairs[index - 1].end if index else pair.start), pair.end
        if not index and document.text[end : mapping.end].lstrip()[:1] == ",":
            end = document.text.index(",", end) + 1
    # A comment or a `**spread` in the removed range would be lost.
    between = document.text[start : pair.start] + document.text[pair.end : end]
    return None if "#" in between or "*" in between else Edit(start, end, "")
