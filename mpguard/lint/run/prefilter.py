"""The gate: which rules could speak about a file, decided on its bytes alone.

A trigger is a *necessary* condition. First the raw bytes are searched for literals; then, since
comments and docstrings are full of precision words, the same on text without them. Only literals
and alternatives of literals: a lookbehind would cost eight times the search. A rule's `pattern` is
searched where nothing else is left to decide.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from mpguard.lint.model.rule import BaseRule, any_of
from mpguard.lint.source.strip_comments import stripped

R = TypeVar("R", bound="BaseRule | type[BaseRule]")

#: Keys that a DeepSpeed config must have, or alone has.
_DEEPSPEED_KEYS = (b"zero_optimization", b"train_micro_batch_size_per_gpu", b"train_batch_size", b"torch_autocast")
#: As a dict in Python code has them: in quotes (`per_device_train_batch_size` is everywhere).
_DEEPSPEED_DICT = (any_of(*(quote + key + quote for key in _DEEPSPEED_KEYS for quote in (b'"', b"'"))),)


def may_hold_deepspeed_config(data: bytes) -> bool:
    """Whether a Python file could write a DeepSpeed config as a dict."""
    return matches((_DEEPSPEED_KEYS,), data) and matches(_DEEPSPEED_DICT, stripped(data))


def matches(triggers: tuple[tuple[bytes, ...], ...], data: bytes) -> bool:
    """Whether each condition has one of its tokens in `data`."""
    return all(any(token in data for token in tokens) for tokens in triggers)


def relevant(data: bytes, rules: Iterable[R]) -> list[R]:
    """The rules whose triggers the file meets; the others have nothing to say about it."""
    rules = tuple(rules)
    plan = _plan(rules)
    left = plan.met(data, (1 << len(rules)) - 1)
    if left & plan.asking:
        code = stripped(data)
        left = plan.met(code, left)
        return [
            rule
            for place, rule in enumerate(rules)
            if left >> place & 1 and (rule.pattern is None or rule.pattern.search(code))
        ]
    return [rule for place, rule in enumerate(rules) if left >> place & 1]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The conditions of many rules, in the order in which they are asked.

    conditions: tokens, and the rules that fall silent where none of them stands, as bits. words: as `_words` has them.
    asking: the rules with conditions.
    """

    conditions: tuple[tuple[tuple[bytes, ...], int], ...]
    words: Mapping[bytes, bytes]
    asking: int

    def met(self, data: bytes, left: int) -> int:
        """Those of some rules whose conditions are met. Each token is looked for once, and only if it can decide."""
        found: dict[bytes, bool] = {}

        def stands(token: bytes) -> bool:
            known = found.get(token)
            if known is None:
                word = self.words.get(token)
                known = found[token] = (word is None or stands(word)) and token in data
            return known

        for tokens, silent in self.conditions:
            if left & silent and not any(map(stands, tokens)):
                left &= ~silent
                if not left:
                    break
        return left


@functools.lru_cache(maxsize=64)
def _plan(rules: tuple[BaseRule | type[BaseRule], ...]) -> _Plan:
    """First come the conditions that silence all rules with the fewest words: most files have none of them."""
    bits: dict[tuple[bytes, ...], int] = {}
    for place, rule in enumerate(rules):
        for tokens in rule.triggers:
            bits[tokens] = bits.get(tokens, 0) | 1 << place
    words = _words({token for tokens in bits for token in tokens})
    costs = {tokens: {_shortest(token, words) for token in tokens} for tokens in bits}
    asking = functools.reduce(int.__or__, bits.values(), 0)

    def silenced(looked: set[bytes]) -> int:
        """The rules that a file in which none of some words stands silences."""
        return functools.reduce(int.__or__, (bits[tokens] for tokens in bits if costs[tokens] <= looked), 0)

    looked = set[bytes]()
    while left := asking & ~silenced(looked):
        gains = {tokens: (bits[tokens] & left).bit_count() / (1 + len(costs[tokens] - looked)) for tokens in bits}
        looked |= costs[max(gains, key=gains.__getitem__)]
    for word in sorted(looked, key=lambda word: (len(word), word)):  # short ones take longer to look for
        if silenced(looked - {word}) == asking:
            looked.remove(word)
    first = {tokens for tokens in bits if costs[tokens] <= looked}

    def place_of(tokens: tuple[bytes, ...]) -> tuple[bool, float, tuple[bytes, ...]]:
        return tokens not in first, len(costs[tokens]) / bits[tokens].bit_count(), tokens

    return _Plan(tuple((tokens, bits[tokens]) for tokens in sorted(bits, key=place_of)), words, asking)


#: Words of tokens that are in every other file.
_COMMON = frozenset({
    b"torch", b"import", b"from", b"dtype", b"else", b"with", b"return", b"self", b"type", b"float", b"scale", b"train",
})  # fmt: skip


def _words(tokens: Collection[bytes]) -> dict[bytes, bytes]:
    """Token -> the longest word in it that stands in others too, and so on: `dtype=torch.half`, `torch.half`, `half`.

    One search for `half` in place of one for each of ten tokens, in most files.
    """
    words = {word for token in tokens for run in re.findall(rb"[\w.]{4,}", token) for word in (run, *run.split(b"."))}
    text = b"\n".join(tokens)
    shared = {word for word in words - _COMMON if len(word) > 3 and text.count(word) > 1}
    chosen: dict[bytes, bytes] = {}
    for token in shared.union(tokens):
        inside = [word for word in shared if word != token and word in token]
        if inside:
            chosen[token] = max(inside, key=lambda word: (len(word), word))
    return chosen


def _shortest(token: bytes, words: Mapping[bytes, bytes]) -> bytes:
    """What is looked for first of all where a token is asked for."""
    while token in words:
        token = words[token]
    return token
