"""The gate: which rules could speak about a file, decided on its bytes alone.

A trigger is a *necessary* condition. First the raw bytes are searched for literals; then, since
comments and docstrings are full of precision words, the same on text without them. Only literals
and alternatives of literals: a lookbehind would cost eight times the search. A rule's `pattern` is
searched where nothing else is left to decide.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from mpguard.lint.rule import BaseRule, any_of

R = TypeVar("R", bound="BaseRule | type[BaseRule]")

#: Strings are matched first, so that a `#` in one starts no comment. A triple-quoted string goes,
#: unless it is an f-string, whose braces hold code.
_NOISE = re.compile(
    rb'(?P<keep>[fFtT][rR]?"""(?:[^\\"]|\\.|"(?!""))*"""|[fFtT][rR]?\'\'\'(?:[^\\\']|\\.|\'(?!\'\'))*\'\'\')'
    rb'|(?P<drop>"""(?:[^\\"]|\\.|"(?!""))*"""|\'\'\'(?:[^\\\']|\\.|\'(?!\'\'))*\'\'\'|#[^\r\n]*)'
    rb'|"(?:[^\\"\r\n]|\\.)*"|\'(?:[^\\\'\r\n]|\\.)*\'',
    re.DOTALL,
)

#: What a Python file with a DeepSpeed config in a dict holds: a key that such a config must have, or alone has, in
#: quotes (`per_device_train_batch_size` is everywhere).
DEEPSPEED_DICT = (
    any_of(*(
        quote + key + quote
        for key in (b"zero_optimization", b"train_micro_batch_size_per_gpu", b"train_batch_size", b"torch_autocast")
        for quote in (b'"', b"'")
    )),
)  # fmt: skip


def speaks(triggers: tuple[tuple[bytes, ...], ...], data: bytes) -> bool:
    """Whether each condition has one of its tokens in `data`."""
    return all(any(token in data for token in tokens) for tokens in triggers)


def relevant(data: bytes, rules: Iterable[R]) -> list[R]:
    """The rules whose triggers the file meets; the others have nothing to say about it."""
    rules = tuple(rules)
    words = _words(frozenset(rule.triggers for rule in rules))
    left = _speaking(data, rules, words)
    if not any(rule.triggers for rule in left):
        return left
    code = stripped(data)
    return [rule for rule in _speaking(code, left, words) if rule.pattern is None or rule.pattern.search(code)]


def _speaking(data: bytes, rules: Iterable[R], words: Mapping[bytes, bytes]) -> list[R]:
    """As `speaks`, for many rules: each token is looked for once, and not at all without the word in it."""
    found: dict[bytes, bool] = {}
    met: dict[tuple[bytes, ...], bool] = {}

    def stands(token: bytes) -> bool:
        known = found.get(token)
        if known is None:
            word = words.get(token)
            known = found[token] = (word is None or stands(word)) and token in data
        return known

    def holds(tokens: tuple[bytes, ...]) -> bool:
        known = met.get(tokens)
        if known is None:
            known = met[tokens] = any(map(stands, tokens))
        return known

    return [rule for rule in rules if all(map(holds, rule.triggers))]


#: Words of tokens that are in every other file.
_COMMON = frozenset({b"torch", b"import", b"from", b"dtype", b"else", b"with", b"return", b"self", b"type", b"float"})


@functools.lru_cache(maxsize=8)
def _words(triggers: frozenset[tuple[tuple[bytes, ...], ...]]) -> dict[bytes, bytes]:
    """Token -> the word in it that stands in most other tokens: one search for `float16` in place of thirteen."""
    tokens = {token for conditions in triggers for condition in conditions for token in condition}
    words = collections.Counter(word for token in tokens for word in set(re.findall(rb"\w{4,}", token)) - _COMMON)
    chosen: dict[bytes, bytes] = {}
    for token in tokens:
        inside = [word for word, count in words.items() if count > 1 and word != token and word in token]
        if inside:
            chosen[token] = max(inside, key=lambda word: (words[word], -len(word), word))
    return chosen


def stripped(data: bytes) -> bytes:
    """The bytes without comments and triple-quoted strings."""
    return _NOISE.sub(lambda match: b"" if match.lastgroup == "drop" else match.group(), data)
