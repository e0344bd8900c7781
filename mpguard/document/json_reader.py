"""JSON with positions. `read_json` is stricter than `json`, which accepts NaN and the last of two equal keys.

`JsonScanner` contains the grammar of objects and arrays; `read_json` reads all values with it, and a caller that needs
the positions of a few values in a large text (a notebook) skips the others with `decoded`, at the speed of `json`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.document.nodes import MAX_DEPTH, MAX_VALUES, DocumentTree, Node, Pair, Problem, Unreadable

_COMMENT = lazy_pattern(r"(?:#|//)[^\r\n]*|/\*.*?\*/", re.DOTALL)
_SPACE = lazy_pattern(r"[ \t\r\n]*")
_STRING = lazy_pattern(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_NUMBER = lazy_pattern(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD = lazy_pattern(r"-?[A-Za-z_]\w*")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_DECODER = json.JSONDecoder()


def read_json(text: str) -> DocumentTree:
    """Return the nodes of a text, and its problems. Never raises for its content."""
    reader = _Reader(text)
    try:
        return DocumentTree(reader.document(), reader.problems)
    except Unreadable as error:
        return DocumentTree(None, [error.problem, *reader.problems])


class _Ended(Protocol):
    @property
    def end(self) -> int: ...


Value = TypeVar("Value", bound=_Ended)


@dataclasses.dataclass(frozen=True)
class JsonValue:
    """A plain value and its span in the text."""

    value: Any
    start: int
    end: int


class JsonScanner:
    """The objects and arrays of a JSON text, with positions. Raises `Unreadable`.

    end: the offset after the object or array whose members or items were iterated last.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.end = 0

    def skip_space(self, at: int) -> int:
        """Return the offset of the first character from `at` on that is not white space."""
        match = _SPACE.match(self.text, at)
        assert match is not None  # it matches the empty string
        return match.end()

    def decoded(self, at: int) -> JsonValue:
        """Return the value at an offset, as `json` reads it. Raises `json.JSONDecodeError`, `RecursionError`."""
        value, end = _DECODER.raw_decode(self.text, at)
        return JsonValue(value, at, end)

    def members(self, start: int, read: Callable[[int], Value]) -> Iterator[tuple[Node, Value]]:
        """Yield key and value of each member of the object at `start`. read: returns the value at an offset."""
        first, at = True, self.skip_space(start + 1)
        while self.text[at : at + 1] != "}":
            if not first:
                at = self._after_comma(at, "}")
                if self.text[at : at + 1] == "}":
                    break
            first = False
            if self.text[at : at + 1] != '"':
                raise self._unexpected(at, 'a key in double quotes (")')
            key = self._string(at)
            colon = self.skip_space(key.end)
            if self.text[colon : colon + 1] != ":":
                raise self._unexpected(colon, "`:`")
            value = read(self.skip_space(colon + 1))
            yield key, value
            at = self.skip_space(value.end)
        self.end = at + 1

    def items(self, start: int, read: Callable[[int], Value]) -> Iterator[Value]:
        """Yield each item of the array at `start`. read: returns the value at an offset."""
        first, at = True, self.skip_space(start + 1)
        while self.text[at : at + 1] != "]":
            if not first:
                at = self._after_comma(at, "]")
                if self.text[at : at + 1] == "]":
                    break
            first = False
            value = read(at)
            yield value
            at = self.skip_space(value.end)
        self.end = at + 1

    def _string(self, at: int) -> Node:
        match = _STRING.match(self.text, at)
        if match is None:
            raise Unreadable("invalid JSON: this string has no end on its line, or an invalid escape", at)
        return Node("scalar", at, match.end(), json.loads(match[0]), '"')

    def _after_comma(self, at: int, closing: str) -> int:
        """Return the offset of the next member, after the comma at `at`."""
        if self.text[at : at + 1] != ",":
            return self.missing_comma(at, closing)
        after = self.skip_space(at + 1)
        if self.text[after : after + 1] == closing:
            self.extra_comma(at, closing)
        return after

    def extra_comma(self, at: int, closing: str) -> None:
        """Handle a comma after the last member or item."""
        raise Unreadable(f"invalid JSON: a comma before `{closing}`. Remove it", at)

    def missing_comma(self, at: int, closing: str) -> int:
        """Return the offset of the next member or item, which no comma precedes."""
        raise self._unexpected(at, f"`,` or `{closing}`")

    def _unexpected(self, at: int, wanted: str) -> Unreadable:
        rest = self.text[at : at + 2]
        if not rest:
            return Unreadable(f"invalid JSON: the file ends where {wanted} is needed", at, at)
        if rest[0] == "'":
            return Unreadable('invalid JSON: strings are in double quotes (")', at)
        what = "a NUL byte" if rest[0] == "\0" else f"{rest[0]!r}"
        return Unreadable(f"invalid JSON: {what} where {wanted} is needed", at)


class _Reader(JsonScanner):
    """Reads a whole text into nodes.

    What hjson accepts is a problem: comments, commas before a bracket, and lines that no comma separates.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.problems: list[Problem] = []
        self._values = 0

    def skip_space(self, at: int) -> int:
        at = super().skip_space(at)
        while comment := _COMMENT.match(self.text, at):
            message = "invalid JSON: JSON has no comments. Remove this one"
            if all(each.span[0] != at for each in self.problems):  # a place may be checked twice
                self.problems.append(Problem(message, comment.span(), hjson=True))
            at = super().skip_space(comment.end())
        return at

    def extra_comma(self, at: int, closing: str) -> None:
        message = f"invalid JSON: a comma before `{closing}`. Remove it"
        self.problems.append(Problem(message, (at, at + 1), hjson=True))

    def missing_comma(self, at: int, closing: str) -> int:
        line = self.text.rfind("\n", 0, at)
        if self.text[at : at + 1] != '"' or self.text[line + 1 : at].strip() or line < 0:
            return super().missing_comma(at, closing)
        message = "invalid JSON: no comma before this line. Add it"
        self.problems.append(Problem(message, (at, at + 1), hjson=True))
        return at

    def document(self) -> Node | None:
        """Return the root node; None for an empty text."""
        start = self.skip_space(0)
        if start == len(self.text):
            return None
        root = self._value(start, 0)
        rest = self.skip_space(root.end)
        if rest < len(self.text):
            raise self._unexpected(rest, "the end of the file")
        return root

    def _value(self, at: int, depth: int) -> Node:
        self._values += 1
        if self._values > MAX_VALUES:
            raise Unreadable(f"more than {MAX_VALUES} values, the most that a config may have", at)
        if depth > MAX_DEPTH:
            raise Unreadable(f"nested more than {MAX_DEPTH} levels deep, the most that a config may have", at)
        first = self.text[at : at + 1]
        if first == "{":
            return self._object(at, depth)
        if first == "[":
            return self._array(at, depth)
        if first == '"':
            return self._string(at)
        if match := _NUMBER.match(self.text, at):
            return self._number(match)
        if match := _WORD.match(self.text, at):
            return self._word(match)
        raise self._unexpected(at, "a value")

    def _number(self, match: re.Match[str]) -> Node:
        try:
            value = float(match[0]) if match[1] or match[2] else int(match[0])
        except ValueError:  # more digits than Python converts
            raise Unreadable(
                f"a number of {len(match[0])} digits; a config number has far fewer", match.start(), match.end()
            ) from None
        return Node("scalar", match.start(), match.end(), value)

    def _word(self, match: re.Match[str]) -> Node:
        word = match[0]
        node = Node("scalar", match.start(), match.end(), _WORDS.get(word))
        if word in ("NaN", "Infinity", "-Infinity"):
            node.value = float(word.replace("Infinity", "inf"))
            self.problems.append(Problem(f"`{word}` is not valid JSON. Remove it", node.span))
        elif word not in _WORDS:
            hint = (
                f"; write `{word.lower()}`"
                if word in ("True", "False", "TRUE", "FALSE")
                else "; write `null`"
                if word == "None"
                else ""
            )
            raise Unreadable(f"invalid JSON: `{word[:40]}` is not a value{hint}", *node.span)
        return node

    def _array(self, start: int, depth: int) -> Node:
        node = Node("sequence", start, start, flow=True)
        for item in self.items(start, lambda at: self._value(at, depth + 1)):
            node.items.append(item)
            node.size += item.size
        node.end = self.end
        return node

    def _object(self, start: int, depth: int) -> Node:
        node = Node("mapping", start, start, flow=True)
        for key, value in self.members(start, lambda at: self._value(at, depth + 1)):
            pair = Pair(key.value, key.value, key.span, value)
            if pair.key in node.members:
                self.problems.append(
                    Problem(f"`{pair.name}` is a duplicate key; DeepSpeed refuses that. Remove one", pair.key_span)
                )
            node.pairs.append(pair)
            node.members[pair.key] = pair
            node.size += value.size
        node.end = self.end
        return node
