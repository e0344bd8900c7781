"""The watch of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpguard.watching.session import Watch

_current: Watch | None = None


def current() -> Watch | None:
    """Return the watch of this process while it works; None without one."""
    return _current if _current is not None and _current.active else None


def set_current(watch: Watch | None) -> None:
    """Make a watch the watch of this process."""
    global _current  # noqa: PLW0603  one per process is the point
    _current = watch


def of_parent() -> Watch | None:
    """Return the watch of the process that this one was forked from."""
    return _current
