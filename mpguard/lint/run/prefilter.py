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
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from mpguard.lint.model.rule import BaseRule, any_of
from mpguard.lint.source.strip_comments import stripped
from mpguard.lint.source.token_search import TokenSearch

R = TypeVar("R", bound="BaseRule | type[BaseRule]")

#: Keys that a DeepSpeed config must have, or that no other config has.
_DEEPSPEED_KEYS = (b"zero_optimization", b"train_micro_batch_size_per_gpu", b"train_batch_size", b"torch_autocast")
#: As in a dict of Python code: in quotes (`per_device_train_batch_size` is everywhere).
_DEEPSPEED_DICT = (any_of(*(quote + key + quote for key in _DEEPSPEED_KEYS for quote in (b'"', b"'"))),)


@functools.lru_cache(maxsize=1)
def _code(data: bytes) -> bytes:
    """Return the content of a file without comments and docstrings, once for all questions about it."""
    return stripped(data)


def may_hold_deepspeed_config(data: bytes) -> bool:
    """True if a Python file may contain a DeepSpeed config as a dict."""
    return matches((_DEEPSPEED_KEYS,), data) and matches(_DEEPSPEED_DICT, _code(data))


def matches(triggers: tuple[tuple[bytes, ...], ...], data: bytes) -> bool:
    """True if `data` contains a token of each condition."""
    return all(any(token in data for token in tokens) for tokens in triggers)


def relevant(data: bytes, rules: Iterable[R], nearby: Callable[[], Iterable[bytes]] = tuple) -> list[R]:
    """Return the rules whose triggers the file meets; the others cannot report anything in it.

    nearby: returns the other modules of its program, for `triggers_nearby`.
    """
    rules = tuple(rules)
    found = _by_own_text(data, rules)
    if not any(rule.triggers_nearby for rule in found):
        return found
    code = _code(data)

    def is_met(tokens: tuple[bytes, ...]) -> bool:
        return any(
            not _found_nearby(text, rules).isdisjoint(tokens) for text in itertools.chain((code,), _lazily(nearby))
        )

    return [rule for rule in found if all(map(is_met, rule.triggers_nearby))]


@functools.lru_cache(maxsize=128)
def _found_nearby(text: bytes, rules: tuple[BaseRule | type[BaseRule], ...]) -> set[bytes]:
    """Return which tokens of the rules' `triggers_nearby` a module contains; many files share their modules."""
    return _nearby_search(rules).found_in(text)


@functools.lru_cache(maxsize=64)
def _nearby_search(rules: tuple[BaseRule | type[BaseRule], ...]) -> TokenSearch:
    return TokenSearch({token for rule in rules for tokens in rule.triggers_nearby for token in tokens})


def _lazily(texts: Callable[[], Iterable[bytes]]) -> Iterator[bytes]:
    yield from texts()


def _by_own_text(data: bytes, rules: tuple[R, ...]) -> list[R]:
    plan = _plan(rules)
    left = plan.met(data, (1 << len(rules)) - 1)
    if not left:
        return []
    if left & plan.conditional:
        code = _code(data)
        left = plan.met(code, left)
        return [
            rule
            for place, rule in enumerate(rules)
            if left >> place & 1 and (rule.pattern is None or rule.pattern.search(code))
        ]
    return [rule for place, rule in enumerate(rules) if left >> place & 1]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The conditions of many rules.

    search: finds the tokens of all conditions. conditions: the tokens of each, as a set, and the rules that cannot
    apply where none of them is found, as bits. conditional: the rules with conditions, as bits.
    """

    search: TokenSearch
    conditions: tuple[tuple[frozenset[bytes], int], ...]
    conditional: int

    def met(self, data: bytes, left: int) -> int:
        """Return those of `left` whose conditions are met."""
        found = self.search.found_in(data)
        for tokens, excluded in self.conditions:
            if left & excluded and tokens.isdisjoint(found):
                left &= ~excluded
        return left


@functools.lru_cache(maxsize=64)
def _plan(rules: tuple[BaseRule | type[BaseRule], ...]) -> _Plan:
    bits: dict[frozenset[bytes], int] = {}
    for place, rule in enumerate(rules):
        for tokens in map(frozenset, rule.triggers):
            bits[tokens] = bits.get(tokens, 0) | 1 << place
    search = TokenSearch(frozenset[bytes]().union(*bits))
    return _Plan(search, tuple(bits.items()), functools.reduce(int.__or__, bits.values(), 0))
