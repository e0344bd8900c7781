"""Trees of a file's statements, kept for its next version: who types changes one statement, and parsing is half of all.

Facts are kept by node, so a tree serves one version at a time: the next one takes it over.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpguard.lint.source import Chunk, Source

#: Files whose trees are kept: a tree is some hundred times its text.
MOST = 8


class Trees:
    """What was parsed of the last versions of files, for a process that checks them again and again."""

    def __init__(self) -> None:
        self._last: collections.OrderedDict[str, Source] = collections.OrderedDict()
        self._free: dict[str, list[Chunk]] = {}

    def begin(self, source: Source) -> None:
        """Another version of a file is to be checked; nothing that is known of the one before is used any more."""
        before = self._last.pop(source.path, None)
        self._free = {}
        for chunk in before.chunks if before is not None else ():
            if chunk.parsed:
                self._free.setdefault(chunk.code, []).append(chunk)
        self._last[source.path] = source
        while len(self._last) > MOST:
            self._last.popitem(last=False)
        source.trees = self

    def take(self, code: str) -> Chunk | None:
        """A statement of the version before with the same code, which nobody else has taken."""
        free = self._free.get(code)
        return free.pop() if free else None
