"""What a config file consists of: nodes with places, the same for YAML and JSON.

Offsets count code points of the file's text, with its own line endings.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Iterator
from typing import Any, Literal

from mpguard.core.text_edits import Span

#: A config nested deeper, or with more values after all aliases are expanded, is not read: it is
#: a mistake or an attack ("billion laughs"), and either would stall the reader.
MAX_DEPTH = 100
MAX_VALUES = 100_000

#: Code points. A longer file is data, not a config, and takes PyYAML seconds.
MAX_LENGTH = 1 << 20


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something in a file that keeps it from being a config: what is, what to do, and where."""

    message: str
    span: Span


class Unreadable(Exception):
    """The text is no YAML or JSON from here on; readers turn it into one `Problem`."""

    def __init__(self, message: str, start: int, end: int | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(message, (start, start + 1 if end is None else end))


@dataclasses.dataclass(eq=False)
class Node:
    """A value as it is written.

    start, end: what is written, with anchor and tag; a block ends with its last value, so that
        comments and blank lines after it are not part of it. Empty for `key:` without a value.
    value: a scalar's plain value. style: its quotes, `|` or `>`; empty for a plain one.
    flow: `{...}` or `[...]`. pairs: what a mapping's text holds, `<<` included.
    members: what the mapping means, by key: merges resolved, the last of duplicate keys.
    users: offsets of the aliases of this node's anchor. target: what an alias stands for.
    size: number of values with all aliases expanded.
    """

    kind: Literal["scalar", "mapping", "sequence"]
    start: int
    end: int
    value: Any = None
    style: str = ""
    flow: bool = False
    pairs: list[Pair] = dataclasses.field(default_factory=list)
    members: dict[Hashable, Pair] = dataclasses.field(default_factory=dict)
    items: list[Node] = dataclasses.field(default_factory=list)
    anchor: str | None = None
    users: list[int] = dataclasses.field(default_factory=list)
    alias_of: Node | None = None
    size: int = 1

    @property
    def span(self) -> Span:
        return self.start, self.end

    @property
    def target(self) -> Node:
        return self if self.alias_of is None else self.alias_of

    def own(self, key: str) -> Pair | None:
        """The pair that is written in this mapping under a key; not one that `<<` brings."""
        return next((pair for pair in reversed(self.pairs) if pair.key == key and not pair.merges), None)

    def plain(self) -> Any:
        """The value as plain data; a copy of its own for every alias."""
        node = self.target
        if node.kind == "mapping":
            return {key: pair.value.plain() for key, pair in node.members.items()}
        if node.kind == "sequence":
            return [item.plain() for item in node.items]
        return node.value


@dataclasses.dataclass(eq=False)
class Pair:
    """A key and its value. name: the key as text. merges: it is `<<`."""

    key: Any
    name: str
    key_span: Span
    value: Node
    merges: bool = False

    @property
    def start(self) -> int:
        return self.key_span[0]

    @property
    def end(self) -> int:
        return max(self.key_span[1], self.value.end)


@dataclasses.dataclass
class DocumentTree:
    """What a reader made of a text. root: None for an empty text and after a syntax error."""

    root: Node | None
    problems: list[Problem]


def line_starts(text: str) -> Iterator[int]:
    """Offsets at which lines begin; a line ends with LF, CRLF or CR."""
    yield 0
    yield from (match.end() for match in re.finditer(r"\r\n?|\n", text))
