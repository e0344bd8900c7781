"""Selects the rules that may report something in a file, by its bytes alone.

A trigger is a *necessary* condition. First the raw bytes are searched for literals; then, since
comments and docstrings are full of precision words, the text without them. Triggers are literals
and alternatives of literals only: a lookbehind would make the search eight times as expensive. A
rule's `pattern` is searched last, if all its triggers are met.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TypeVar

from mpguard.lint.model.rule import BaseRule, any_of
from mpguard.lint.source.strip_comments import stripped

R = TypeVar("R", bound="BaseRule | type[BaseRule]")

#: Keys that a DeepSpeed config must have, or that no other config has.
_DEEPSPEED_KEYS = (b"zero_optimization", b"train_micro_batch_size_per_gpu", b"train_batch_size", b"torch_autocast")
#: As in a dict of Python code: in quotes (`per_device_train_batch_size` is everywhere).
_DEEPSPEED_DICT = (any_of(*(quote + key + quote for key in _DEEPSPEED_KEYS for quote in (b'"', b"'"))),)


def may_hold_deepspeed_config(data: bytes) -> bool:
    """True if a Python file may contain a DeepSpeed config as a dict."""
    return matches((_DEEPSPEED_KEYS,), data) and matches(_DEEPSPEED_DICT, stripped(data))


def matches(triggers: tuple[tuple[bytes, ...], ...], data: bytes) -> bool:
    """True if `data` contains a token of each condition."""
    return all(any(token in data for token in tokens) for tokens in triggers)


def relevant(data: bytes, rules: Iterable[R], nearby: Callable[[], Iterable[bytes]] = tuple) -> list[R]:
    """Return the rules whose triggers the file meets; the others cannot report anything in it.

    nearby: returns the other modules of its program, for `triggers_nearby`.
    """
    found = _by_own_text(data, rules)
    if not any(rule.triggers_nearby for rule in found):
        return found
    code = stripped(data)

    def is_met(tokens: tuple[bytes, ...]) -> bool:
        return any(token in text for text in itertools.chain((code,), _lazily(nearby)) for token in tokens)

    return [rule for rule in found if all(map(is_met, rule.triggers_nearby))]


def _lazily(texts: Callable[[], Iterable[bytes]]) -> Iterator[bytes]:
    yield from texts()


def _by_own_text(data: bytes, rules: Iterable[R]) -> list[R]:
    rules = tuple(rules)
    plan = _plan(rules)
    left = plan.met(data, (1 << len(rules)) - 1)
    if not left:
        return []
    if left & plan.conditional:
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
    """The conditions of many rules, in the order in which they are tested.

    conditions: tokens, and the rules that cannot apply where none of them is found, as bits. words: as `_words`
    returns them. conditional: the rules with conditions, as bits.
    """

    conditions: tuple[tuple[tuple[bytes, ...], int], ...]
    words: Mapping[bytes, bytes]
    conditional: int

    def met(self, data: bytes, left: int) -> int:
        """Return those of `left` whose conditions are met. Each token is searched once, and only if it can decide."""
        found: dict[bytes, bool] = {}

        def contains(token: bytes) -> bool:
            known = found.get(token)
            if known is None:
                word = self.words.get(token)
                known = found[token] = (word is None or contains(word)) and token in data
            return known

        for tokens, excluded in self.conditions:
            if left & excluded and not any(map(contains, tokens)):
                left &= ~excluded
                if not left:
                    break
        return left


@functools.lru_cache(maxsize=64)
def _plan(rules: tuple[BaseRule | type[BaseRule], ...]) -> _Plan:
    """Order the conditions: first those that exclude all rules with the fewest words, which most files lack."""
    bits: dict[tuple[bytes, ...], int] = {}
    for place, rule in enumerate(rules):
        for tokens in rule.triggers:
            bits[tokens] = bits.get(tokens, 0) | 1 << place
    words = _words({token for tokens in bits for token in tokens})
    costs = {tokens: {_shortest(token, words) for token in tokens} for tokens in bits}
    conditional = functools.reduce(int.__or__, bits.values(), 0)

    def excluded(searched: set[bytes]) -> int:
        """Return the rules that cannot apply to a file that contains none of some words, as bits."""
        return functools.reduce(int.__or__, (bits[tokens] for tokens in bits if costs[tokens] <= searched), 0)

    searched = set[bytes]()
    while left := conditional & ~excluded(searched):
        gains = {tokens: (bits[tokens] & left).bit_count() / (1 + len(costs[tokens] - searched)) for tokens in bits}
        searched |= costs[max(gains, key=gains.__getitem__)]
    for word in sorted(searched, key=lambda word: (len(word), word)):  # short ones take longer to search
        if excluded(searched - {word}) == conditional:
            searched.remove(word)
    first = {tokens for tokens in bits if costs[tokens] <= searched}

    def place_of(tokens: tuple[bytes, ...]) -> tuple[bool, float, tuple[bytes, ...]]:
        return tokens not in first, len(costs[tokens]) / bits[tokens].bit_count(), tokens

    return _Plan(tuple((tokens, bits[tokens]) for tokens in sorted(bits, key=place_of)), words, conditional)


#: Words of tokens that every second file contains.
_COMMON = frozenset({
    b"torch", b"import", b"from", b"dtype", b"else", b"with", b"return", b"self", b"type", b"float", b"scale", b"train",
})  # fmt: skip


def _words(tokens: Collection[bytes]) -> dict[bytes, bytes]:
    """Return token -> the longest word in it that other tokens contain too: `dtype=torch.half`, `torch.half`, `half`.

    In most files, one search for `half` then replaces one for each of ten tokens.
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
    """Return the word that is searched first for a token."""
    while token in words:
        token = words[token]
    return token
