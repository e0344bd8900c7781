"""What is read from the disk once in a run. A process that outlives one (server, watch mode) forgets it in between."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

T = TypeVar("T")

_FORGET: list[Callable[[], None]] = []


def remembered(function: Callable[..., T]) -> _lru_cache_wrapper[T]:
    """`functools.cache` for a function whose result depends on what lies on the disk."""
    cached = functools.cache(function)
    _FORGET.append(cached.cache_clear)
    return cached


def forget() -> None:
    """Makes all of them look again."""
    for clear in _FORGET:
        clear()
