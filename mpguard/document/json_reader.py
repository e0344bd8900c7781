"""JSON with places. Stricter than `json`, which takes NaN and the last of two equal keys."""

from __future__ import annotations

import json
import re
from typing import Any

from mpguard.document.nodes import MAX_DEPTH, MAX_VALUES, DocumentTree, Node, Pair, Problem, Unreadable

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD = re.compile(r"-?[A-Za-z_]\w*")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}


def read_json(text: str) -> DocumentTree:
    """The nodes of a text, and what is wrong with it. Never raises for its content."""
    reader = _Reader(text)
    try:
        return DocumentTree(reader.document(), reader.problems)
    except Unreadable as error:
        return DocumentTree(None, [error.problem])


class _Reader:
    def __init__(self, text: str) -> None:
        self.problems: list[Problem] = []
        self._text = text
        self._values = 0

    def document(self) -> Node | None:
        start = self._space(0)
        if start == len(self._text):
            return None
        root = self._value(start, 0)
        rest = self._space(root.end)
        if rest < len(self._text):
            raise self._unexpected(rest, "the end of the file")
        return root

    def _space(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        assert match is not None  # it matches the empty string
        return match.end()

    def _unexpected(self, at: int, wanted: str) -> Unreadable:
        rest = self._text[at : at + 2]
        if not rest:
            return Unreadable(f"no valid JSON: the file ends where {wanted} is needed", at, at)
        if rest in ("//", "/*") or rest[0] == "#":
            return Unreadable("no valid JSON: it has no comments. Remove this one", at)
        if rest[0] == "'":
            return Unreadable('no valid JSON: strings are in double quotes (")', at)
        what = "a NUL byte" if rest[0] == "\0" else f"{rest[0]!r}"
        return Unreadable(f"no valid JSON: {what} where {wanted} is needed", at)

    def _value(self, at: int, depth: int) -> Node:
        self._values += 1
        if self._values > MAX_VALUES:
            raise Unreadable(f"more than {MAX_VALUES} values; no config has that", at)
        if depth > MAX_DEPTH:
            raise Unreadable(f"nested more than {MAX_DEPTH} deep; no config is", at)
        first = self._text[at : at + 1]
        if first == "{":
            return self._object(at, depth)
        if first == "[":
            return self._array(at, depth)
        if first == '"':
            return self._string(at)
        if match := _NUMBER.match(self._text, at):
            return self._number(match)
        if match := _WORD.match(self._text, at):
            return self._word(match)
        raise self._unexpected(at, "a value")

    def _string(self, at: int) -> Node:
        match = _STRING.match(self._text, at)
        if match is None:
            raise Unreadable("no valid JSON: this string has no end on its line, or a wrong escape", at)
        return Node("scalar", at, match.end(), json.loads(match[0]), '"')

    def _number(self, match: re.Match[str]) -> Node:
        try:
            value = float(match[0]) if match[1] or match[2] else int(match[0])
        except ValueError:  # more digits than Python converts
            raise Unreadable(
                f"a number of {len(match[0])} digits; no config needs that", match.start(), match.end()
            ) from None
        return Node("scalar", match.start(), match.end(), value)

    def _word(self, match: re.Match[str]) -> Node:
        word = match[0]
        node = Node("scalar", match.start(), match.end(), _WORDS.get(word))
        if word in ("NaN", "Infinity", "-Infinity"):
            node.value = float(word.replace("Infinity", "inf"))
            self.problems.append(
                Problem(f"`{word}` is no JSON, and no value that a config needs. Remove it", node.span)
            )
        elif word not in _WORDS:
            hint = (
                f"; write `{word.lower()}`"
                if word in ("True", "False", "TRUE", "FALSE")
                else "; write `null`"
                if word == "None"
                else ""
            )
            raise Unreadable(f"no valid JSON: `{word[:40]}` is no value{hint}", *node.span)
        return node

    def _array(self, start: int, depth: int) -> Node:
        node = Node("sequence", start, start, flow=True)
        at = self._space(start + 1)
        while self._text[at : at + 1] != "]":
            if node.items:
                at = self._comma(at, "]")
            item = self._value(at, depth + 1)
            node.items.append(item)
            node.size += item.size
            at = self._space(item.end)
        node.end = at + 1
        return node

    def _object(self, start: int, depth: int) -> Node:
        node = Node("mapping", start, start, flow=True)
        at = self._space(start + 1)
        while self._text[at : at + 1] != "}":
            if node.pairs:
                at = self._comma(at, "}")
            if self._text[at : at + 1] != '"':
                raise self._unexpected(at, 'a key in double quotes (")')
            key = self._string(at)
            colon = self._space(key.end)
            if self._text[colon : colon + 1] != ":":
                raise self._unexpected(colon, "`:`")
            pair = Pair(key.value, key.value, key.span, self._value(self._space(colon + 1), depth + 1))
            if pair.key in node.members:
                self.problems.append(
                    Problem(f"`{pair.name}` is there twice; DeepSpeed refuses that. Remove one", pair.key_span)
                )
            node.pairs.append(pair)
            node.members[pair.key] = pair
            node.size += pair.value.size
            at = self._space(pair.end)
        node.end = at + 1
        return node

    def _comma(self, at: int, closing: str) -> int:
        """Where the next member begins, after the comma at `at`."""
        if self._text[at : at + 1] != ",":
            raise self._unexpected(at, f"`,` or `{closing}`")
        after = self._space(at + 1)
        if self._text[after : after + 1] == closing:
            raise Unreadable(f"no valid JSON: a comma before `{closing}`. Remove it", at)
        return after
