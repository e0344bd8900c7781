"""Nodes with positions, of which a config file consists, for YAML and JSON alike.

Offsets count code points of the file's text, with its own line endings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, Literal

from mpguard.core.text_edits import Span

#: A config that is nested deeper, or has more values after all aliases are expanded, is refused: it is a mistake or an
#: attack ("billion laughs"), and reading it would take too long.
MAX_DEPTH = 100
MAX_VALUES = 100_000

#: In code points. A longer file is data and not a config, and PyYAML needs seconds to read it.
MAX_LENGTH = 1 << 20


@dataclasses.dataclass(frozen=True)
class Problem:
    """A reason why a file is not a config, or not the one that people read: what is wrong, what to do, and where.

    repeats: the name of the key, if the problem is that it is there twice. hjson: DeepSpeed's own reader, hjson, reads
    the file as it is meant; Trainer and accelerate, which read with `json`, refuse it.
    """

    message: str
    span: Span
    repeats: str = ""
    hjson: bool = False


class Unreadable(Exception):
    """The text is not valid YAML or JSON from an offset on; readers return it as a `Problem`."""

    def __init__(self, message: str, start: int, end: int | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(message, (start, start + 1 if end is None else end))


@dataclasses.dataclass(eq=False)
class Node:
    """A value as it is written.

    start, end: the span of the text, with anchor and tag; a block ends with its last value, so that comments and blank
        lines after it are not part of it. Empty for `key:` without a value.
    value: a scalar's plain value. style: its quotes, `|` or `>`; empty for a plain scalar.
    flow: written as `{...}` or `[...]`. pairs: the pairs in a mapping's text, including `<<`.
    members: the pairs of the mapping's value, by key: merges resolved, the last of duplicate keys.
    users: offsets of the aliases of this node's anchor. target: the node that an alias refers to.
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
        """Return the pair that is written in this mapping under a key, not one that `<<` merges; None if absent."""
        return next((pair for pair in reversed(self.pairs) if pair.key == key and not pair.merges), None)

    def plain(self) -> Any:
        """Return the value as plain data; a separate copy for every alias."""
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
    """The result of reading a text. root: None for an empty text and after a syntax error."""

    root: Node | None
    problems: list[Problem]
