"""Finds which of many tokens a text contains, in one pass over its bytes."""

from __future__ import annotations

from collections.abc import Iterable

from ahocorasick_rs import BytesAhoCorasick, Implementation

#: Bytes that are searched at a time: a match takes 150 bytes of memory, and a large file may be nothing but matches.
_WINDOW = 1 << 20


class TokenSearch:
    """Searches for a fixed set of tokens. Takes as long for hundreds of them as for one."""

    def __init__(self, tokens: Iterable[bytes]) -> None:
        self._tokens = sorted(tokens)
        self._overlap = max(map(len, self._tokens), default=1) - 1
        self._automaton = BytesAhoCorasick(self._tokens, implementation=Implementation.DFA)

    def found_in(self, data: bytes) -> set[bytes]:
        """Return the tokens that the bytes contain."""
        places = set[int]()
        for start in range(0, len(data), _WINDOW):
            window = data[start : start + _WINDOW + self._overlap]
            matches = self._automaton.find_matches_as_indexes(window, overlapping=True)
            places.update([place for place, _, _ in matches])
        return {self._tokens[place] for place in places}
