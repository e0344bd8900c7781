"""What is read from the disk once in a run. A process that outlives one (server, watch mode) forgets it in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpguard import looks

T = TypeVar("T")

_MEMORIES: list[looks.Memory[object]] = []


def remembered(function: Callable[..., T]) -> looks.Memory[T]:
    """`functools.cache` for a function whose result depends on what lies on the disk."""
    memory = looks.Memory(function)
    _MEMORIES.append(memory)  # type: ignore[arg-type]
    return memory


def forget() -> None:
    """Makes all of them look again."""
    for memory in _MEMORIES:
        memory.cache_clear()
    looks.forget()
