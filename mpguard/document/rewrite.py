"""Turn a `Change` of a key into edits of the config's text.

Changes are written one at a time, and the text is read again after each, so that a change finds the sections that
earlier ones added or removed. The result is compared with that of `targets.merged`; a change that cannot be written
without affecting another key is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable
from typing import Any

import yaml

from mpguard.core.errors import ConfigError
from mpguard.core.text_edits import Edit
from mpguard.document import Document, parse
from mpguard.document.nodes import Node, Pair
from mpguard.targets.inject import Change
from mpguard.targets.settings import ABSENT, Setting, merged, show


def edits(document: Document, changes: Iterable[Change]) -> tuple[Edit, ...]:
    """Return the edits that write changes into a document: the implementation of `Document.edits`."""
    document.require()
    draft = _Draft(document.text)
    first_break = re.search(r"\r\n|\n|\r", document.text)
    newline = first_break[0] if first_break else "\n"
    for change in changes:
        now = parse(draft.text, document.path, document.format)
        wanted = merged(now.data, {change.key: Setting(change.new)})
        if _same(now.data, wanted):
            continue
        writer = (_Json if now.format == "json" else _Yaml)(now, draft, newline)
        if change.new is ABSENT:
            writer.remove(change.path)
        else:
            writer.put(change.path, change.new)
        after = parse(draft.text, document.path, document.format)
        if after.problems or not _same(after.data, wanted):
            raise ConfigError(
                f"{document.path}: `{change.key}` cannot be set to {show(change.new)} without changing other lines. "
                "Change it by hand"
            )
    return draft.edits()


def _same(one: Any, other: Any) -> bool:
    """True if plain data is equal, where 1 differs from True and from 1.0, and NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


class _Draft:
    """A text that is being changed, as pieces: spans of the original, and new text."""

    def __init__(self, original: str) -> None:
        self._original = original
        self._pieces: list[tuple[int, int] | str] = [(0, len(original))]
        self.text = original

    def replace(self, start: int, end: int, text: str) -> None:
        """Replace a span of the current text."""
        before, _ = self._split(start)
        _, after = self._split(end)
        self._pieces = [*before, text, *after]
        self.text = self.text[:start] + text + self.text[end:]

    def _split(self, at: int) -> tuple[list[tuple[int, int] | str], list[tuple[int, int] | str]]:
        left: list[tuple[int, int] | str] = []
        for index, piece in enumerate(self._pieces):
            length = len(piece) if isinstance(piece, str) else piece[1] - piece[0]
            if at <= length:
                if isinstance(piece, str):
                    return [*left, piece[:at]], [piece[at:], *self._pieces[index + 1 :]]
                middle = piece[0] + at
                return [*left, (piece[0], middle)], [(middle, piece[1]), *self._pieces[index + 1 :]]
            at -= length
            left.append(piece)
        return left, []

    def edits(self) -> tuple[Edit, ...]:
        """Return the edits that turn the original into the current text."""
        edits: list[Edit] = []
        position, new = 0, ""
        for piece in [*self._pieces, (len(self._original), len(self._original))]:
            if isinstance(piece, str):
                new += piece
                continue
            start, end = piece
            last = start == end == len(self._original)
            if start == end and not last:
                continue
            if new != self._original[position:start]:
                edits.append(Edit(position, start, new))
            position, new = end, ""
        return tuple(edits)


@dataclasses.dataclass(frozen=True)
class _Place:
    """The context of a new value.

    indent: the indentation of its line. wide: a section is written with one line per key. like: the scalar that the
    value replaces, whose quotes it gets.
    """

    indent: str = ""
    wide: bool = False
    like: Node | None = None


@dataclasses.dataclass
class _Writer:
    """Writes one change into a draft whose text is that of the document. Subclasses implement the formats."""

    document: Document
    draft: _Draft
    newline: str

    def __post_init__(self) -> None:
        self.text = self.document.text

    # implemented per format

    #: True if a new section is written with one line per key.
    wide = False

    def render(self, value: Any, place: _Place) -> str:
        """Return a value as text that begins on the line of its key; only a JSON section has several lines."""
        raise NotImplementedError

    def key(self, name: str) -> str:
        """Return a key as text, in quotes where it needs them."""
        raise NotImplementedError

    def insert(self, mapping: Node, name: str, value: Any) -> None:
        """Add a key to a mapping."""
        self._insert_into_flow(mapping, name, value)

    # the same for both formats

    def put(self, path: tuple[str, ...], value: Any) -> None:
        """Set the value at a path, and add the missing sections."""
        trail = self._trail(path)
        pair = trail[-1] if trail else None
        if len(trail) == len(path):
            assert pair is not None
            self._check_reach(trail[:-1])
            self._replace(pair, value)
            return
        for name in reversed(path[len(trail) + 1 :]):
            value = {name: value}
        self._check_reach(trail)
        if pair is not None and pair.value.kind == "scalar":  # `section:` without a value, or null
            self._fill(pair, path[len(trail)], value)
            return
        mapping = self._root if pair is None else pair.value
        assert mapping is not None
        if pair is None or path[len(trail)] not in mapping.target.members or len(trail) == len(path) - 1:
            self.insert(mapping, path[len(trail)], value)
            return
        self._refuse(mapping.members[path[len(trail)]].start, path, "comes through `<<` from here")

    def remove(self, path: tuple[str, ...]) -> None:
        """Remove the value at a path, and the sections that become empty."""
        trail = self._trail(path)
        if len(trail) < len(path):
            found = self.document.entry(".".join(path))
            if found is not None:
                self._refuse(found.key_span[0], path, "comes through `<<` from here")
            if not trail or trail[-1].value.kind != "mapping" or trail[-1].value.members:
                return
        while len(trail) > 1 and len(trail[-2].value.pairs) == 1:
            trail = trail[:-1]
        self._check_reach(trail[:-1])
        self._check_anchors_inside(trail[-1].value)
        mapping = trail[-2].value if len(trail) > 1 else self._root
        if len(mapping.pairs) == 1:  # only the root may be empty
            self._empty(mapping)
        elif mapping.flow:
            self._remove_from_flow(mapping, trail[-1])
        else:
            self._remove_lines(trail[-1])

    @property
    def _root(self) -> Node:
        assert self.document.root is not None  # `require()` was called
        return self.document.root

    def _trail(self, path: tuple[str, ...]) -> list[Pair]:
        """Return the pairs on the way to a path, as far as they are written in the text."""
        trail: list[Pair] = []
        node = self._root
        for name in path:
            pair = node.own(name) if node.kind == "mapping" and node.alias_of is None else None
            if pair is None:
                break
            trail.append(pair)
            node = pair.value
        return trail

    def _check_reach(self, through: list[Pair]) -> None:
        """Refuse a change inside a section that an alias or `<<` uses elsewhere."""
        for pair in through:
            node = pair.value
            if node.users:
                self._refuse(node.users[0], (pair.name,), f"has the anchor `&{node.anchor}`, and is used again here")
            if node.alias_of is not None:
                why = f"is an alias of `&{node.alias_of.anchor}`, whose other users would change too"
                self._refuse(node.start, (pair.name,), why)

    def _check_anchors_inside(self, node: Node) -> None:
        """Refuse to remove or replace an anchor that an alias uses."""
        if node.alias_of is not None:
            return
        if node.users:
            self._refuse(node.users[0], (), f"the anchor `&{node.anchor}` would be lost, which is used here")
        for inner in (*node.items, *(pair.value for pair in node.pairs)):
            self._check_anchors_inside(inner)

    def _refuse(self, offset: int, path: tuple[str, ...], why: str) -> None:
        subject = f"`{'.'.join(path)}` " if path else ""
        raise ConfigError(f"{self.document.place(offset)}: {subject}{why}. Write the section out, or change it by hand")

    def _replace(self, pair: Pair, value: Any) -> None:
        node = pair.value
        self._check_anchors_inside(node)
        end = node.end
        while node.style in ("|", ">") and self.text[end - 1] in " \t\r\n":
            end -= 1
        if node.kind != "scalar" and not node.flow and node.alias_of is None:
            self._replace_block(pair, value)
            return
        anchor = f"&{node.anchor} " if node.anchor else ""
        text = anchor + self.render(value, _Place(self._indent(pair.start), self.wide, node))
        if node.start == node.end:
            text = (" " if self.text[node.start - 1 : node.start] == ":" else ": ") + text
        self.draft.replace(node.start, end, text)

    def _replace_block(self, pair: Pair, value: Any) -> None:
        """Replace a block below its key by one value on the key's line."""
        colon = self.text.index(":", pair.key_span[1]) + 1
        self.draft.replace(self._line_end(colon), pair.value.end, "")
        self.draft.replace(colon, colon, " " + self.render(value, _Place()))

    def _fill(self, pair: Pair, name: str, value: Any) -> None:
        """Replace `section:` without a value by a section."""
        self._replace(pair, {name: value})

    def _empty(self, mapping: Node) -> None:
        self.draft.replace(mapping.start, mapping.end, "{}")

    def _remove_lines(self, pair: Pair) -> None:
        start = self._line_start(pair.start)
        if self.text[start : pair.start].strip():
            self._refuse(pair.start, (pair.name,), "is not alone on its line")
        end = self._line_end(pair.end)
        if not (pair.value.style in ("|", ">") and pair.end > 0 and self.text[pair.end - 1] in "\r\n"):
            end += len(self._break_at(end))
        else:
            end = pair.end
        self.draft.replace(start, end, "")

    def _remove_from_flow(self, mapping: Node, pair: Pair) -> None:
        index = mapping.pairs.index(pair)
        last = index == len(mapping.pairs) - 1
        one, other = (mapping.pairs[index - 1], pair) if last else (pair, mapping.pairs[index + 1])
        between = self.text[one.end : other.start]
        if "#" not in between:
            self.draft.replace(*((one.end, pair.end) if last else (pair.start, other.start)), "")
            return
        comma = one.end + re.match(r"(?:\s|#[^\r\n]*)*", between).end()  # type: ignore[union-attr]
        for start, end in sorted([(pair.start, pair.end), (comma, comma + 1)], reverse=True):
            self.draft.replace(start, end, "")

    def _insert_into_flow(self, mapping: Node, name: str, value: Any) -> None:
        """Add a pair after the last one, with the same separators as the other pairs."""
        if not mapping.pairs:
            start = self.text.rindex("{", mapping.start, mapping.end)
            place = _Place(self._indent(start), self.wide)
            self.draft.replace(start, mapping.end, self.render({name: value}, place))
            return
        last = mapping.pairs[-1]
        comma = self._separator(mapping)
        wide = self.newline in comma
        indent = self._indent(last.start if wide else mapping.start)
        colon = self.text[last.key_span[1] : last.value.start]
        if not re.fullmatch(r"[ \t]*:[ \t]*", colon) or (colon == ":" and self.document.format == "yaml"):
            colon = ": "
        text = self.key(name) + colon + self.render(value, _Place(indent, wide))
        end = self._line_end(last.end)
        rest = re.fullmatch(r"[ \t]*(,?)[ \t]*#.*", self.text[last.end : end])
        if rest is None:
            self.draft.replace(last.end, last.end, comma + text)
        else:  # the comment stays on the line of the last pair
            self.draft.replace(end, end, self.newline + self._indent(last.start) + text)
            self.draft.replace(last.end, last.end, "" if rest[1] else ",")

    def _separator(self, mapping: Node) -> str:
        """Return a comma and the white space after it as in the mapping; a line break if each pair has a line."""
        last = mapping.pairs[-1]
        if len(mapping.pairs) > 1:
            comma = self.text[mapping.pairs[-2].end : last.start]
        else:
            comma = "," + self.text[mapping.start : last.start].partition("{")[2]
        if comma == "," and self.text[last.key_span[1] : last.value.start].endswith(" "):
            return ", "
        return comma if re.fullmatch(r"\s*,\s*", comma) else "," + self.newline + self._indent(last.start)

    # lines

    def _line_start(self, at: int) -> int:
        return at - (self.document.position(at)[1] - 1)

    def _line_end(self, at: int) -> int:
        match = re.compile(r"[\r\n]|\Z").search(self.text, at)
        assert match is not None  # `\Z` always matches
        return match.start()

    def _break_at(self, at: int) -> str:
        return "\r\n" if self.text.startswith("\r\n", at) else self.text[at : at + 1]

    def _indent(self, at: int) -> str:
        """Return the indentation of the line with an offset."""
        start = self._line_start(at)
        return self.text[start : start + len(self.text[start:at]) - len(self.text[start:at].lstrip(" \t"))]


class _Json(_Writer):
    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = self._root.pairs
        opening = self.text[self._root.start + 1 : pairs[0].start] if pairs else self.newline
        self.wide = "\n" in opening or "\r" in opening
        self.unit = (self._indent(pairs[0].start) if pairs and self.wide else "") or "  "
        self.colon = self.text[pairs[0].key_span[1] : pairs[0].value.start] if pairs else ": "

    def render(self, value: Any, place: _Place) -> str:
        space = " " if self.colon.endswith((" ", "\t", "\n")) else ""
        if not place.wide or not isinstance(value, dict):
            return json.dumps(value, separators=("," + space, ":" + space))
        lines = json.dumps(value, indent=self.unit, separators=(",", ":" + (space or " "))).split("\n")
        return (self.newline + place.indent).join(lines)

    def key(self, name: str) -> str:
        return json.dumps(name)


class _Dumper(yaml.SafeDumper):
    """Writes every text on one line: text with line breaks is put in double quotes."""


def _represent_text(dumper: _Dumper, text: str) -> Any:
    style = '"' if re.search(r"[\r\n\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)


class _Yaml(_Writer):
    def render(self, value: Any, place: _Place) -> str:
        style = self._style(place.like) if isinstance(value, str) else None
        return self._dump([value], style)[1:-1]

    def _style(self, like: Node | None) -> str | None:
        """Return the quotes of the old value if it did not need them, because then they are the author's style."""
        if like is None or like.style not in ("'", '"'):
            return None
        return like.style if self._dump([like.value], None)[1:-1] == like.value else None

    def key(self, name: str) -> str:
        return self._dump([name], None)[1:-1]

    @staticmethod
    def _dump(value: Any, style: str | None) -> str:
        """Return a value in flow style on one line, which is valid inside a block too."""
        options: dict[str, Any] = {"default_flow_style": True, "allow_unicode": True, "sort_keys": False}
        text: str = yaml.dump(value, Dumper=_Dumper, default_style=style, width=1 << 30, **options)
        return text.rstrip("\n")

    def insert(self, mapping: Node, name: str, value: Any) -> None:
        if mapping.flow:
            self._insert_into_flow(mapping, name, value)
            return
        last = mapping.pairs[-1]
        lines = self._block(name, value, " " * (self.document.position(mapping.pairs[0].start)[1] - 1))
        self._insert_lines_after(last.end, lines, last)

    def _insert_lines_after(self, at: int, lines: list[str], last: Pair) -> None:
        ends_with_break = at > 0 and self.text[at - 1] in "\r\n" and at > last.key_span[1]
        if ends_with_break:  # the span of a block scalar includes its line break
            self.draft.replace(at, at, "".join(line + self.newline for line in lines))
        else:
            end = self._line_end(at)
            self.draft.replace(end, end, "".join(self.newline + line for line in lines))

    def _fill(self, pair: Pair, name: str, value: Any) -> None:
        node = pair.value
        block = self.text[self._line_start(pair.start) : pair.start].strip() == "" and self._in_block(pair)
        if not block or node.anchor:
            super()._fill(pair, name, value)
            return
        column = self.document.position(pair.start)[1] - 1
        lines = self._block(name, value, " " * (column + self._unit()))
        end = self._line_end(max(node.end, pair.key_span[1]))
        self.draft.replace(end, end, "".join(self.newline + line for line in lines))
        if node.end > node.start:
            start = node.start
            while self.text[start - 1] in " \t":
                start -= 1
            self.draft.replace(start, node.end, "")

    def _in_block(self, pair: Pair) -> bool:
        node = self._root
        while not node.flow:
            inner = next((each for each in node.pairs if each is pair or each.start <= pair.start < each.end), None)
            if inner is None or inner is pair:
                return inner is pair
            node = inner.value
        return False

    def _block(self, name: str, value: Any, indent: str) -> list[str]:
        """Return `name: value` as lines; a section has several."""
        if not (isinstance(value, dict) and value):
            return [f"{indent}{self.key(name)}: {self.render(value, _Place())}"]
        lines = [f"{indent}{self.key(name)}:"]
        for key, inner in value.items():
            lines += self._block(key, inner, indent + " " * self._unit())
        return lines

    def _unit(self) -> int:
        """Return the indentation of a section in this file: that of the first section, or 2."""
        root = self._root
        for pair in root.pairs:
            inner = pair.value
            if inner.kind == "mapping" and not inner.flow and inner.alias_of is None and inner.pairs:
                deeper = self.document.position(inner.pairs[0].start)[1] - self.document.position(pair.start)[1]
                if deeper > 0:
                    return deeper
        return 2
