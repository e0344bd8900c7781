"""Edits of configs: what the fixes of config rules have in common, for files and for dicts in Python code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mpguard.core.errors import MpguardError
from mpguard.core.text_edits import Edit
from mpguard.lint.model.rule import Applicability, Fix
from mpguard.targets.inject import Change
from mpguard.targets.settings import ABSENT

if TYPE_CHECKING:
    from mpguard.document import Document, Entry
    from mpguard.document.nodes import Node, Pair


def renamed(title: str, document: Document, entry: Entry, key: str, applicability: Applicability = "safe") -> Fix:
    """The key under another name, in its own quotes."""
    start, end = entry.key_span
    written = document.text[start:end]
    quote = written[0] if written[:1] in ("'", '"') else ""
    return Fix(title, applicability, (Edit(start, end, f"{quote}{key}{quote}"),))


def put(title: str, document: Document, values: dict[str, Any], applicability: Applicability = "safe") -> Fix | None:
    """The keys get these values; `ABSENT` removes one. None where that would change anything else."""
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


def _python_edit(document: Document, path: Iterable[str], value: Any) -> Edit | None:
    """A value that is replaced by a literal, or a member that goes with its comma."""
    holder: Node | None = None
    pair: Pair | None = None
    node = document.root
    for name in path:
        pair = node.own(name) if node is not None else None
        if pair is None:
            return None
        holder, node = node, pair.value
    if pair is None or holder is None:
        return None
    if value is not ABSENT:
        text = f'"{value}"' if isinstance(value, str) else repr(value)
        return Edit(*pair.value.span, text)
    index = holder.pairs.index(pair)
    if index + 1 < len(holder.pairs):
        start, end = pair.start, holder.pairs[index + 1].start
    else:
        start, end = (holder.pairs[index - 1].end if index else pair.start), pair.end
        if not index and document.text[end : holder.end].lstrip()[:1] == ",":
            end = document.text.index(",", end) + 1
    between = document.text[start : pair.start] + document.text[pair.end : end]
    return None if "#" in between or "*" in between else Edit(start, end, "")
