"""The gate: which rules could speak about a file, decided on its bytes alone.

A trigger is a *necessary* condition. First the raw bytes are searched for literals; then, since
comments and docstrings are full of precision words, the same on text without them. Only literals
and alternatives of literals: a lookbehind would cost eight times the search.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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
    left = _speaking(data, rules)
    if not any(rule.triggers for rule in left):
        return left
    return _speaking(stripped(data), left)


def _speaking(data: bytes, rules: Iterable[R]) -> list[R]:
    """As `speaks`, for many rules: each token is looked for once."""
    found: dict[bytes, bool] = {}

    def stands(token: bytes) -> bool:
        known = found.get(token)
        if known is None:
            known = found[token] = token in data
        return known

    return [rule for rule in rules if all(any(map(stands, tokens)) for tokens in rule.triggers)]


def stripped(data: bytes) -> bytes:
    """The bytes without comments and triple-quoted strings."""
    return _NOISE.sub(lambda match: b"" if match.lastgroup == "drop" else match.group(), data)
