"""`mpguard.watch`, and how a launched run starts the watch."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.core.watch_levels import DEFAULT_WATCH_LEVEL, watch_level
from mpguard.runtime.plan import Plan
from mpguard.watching import patches
from mpguard.watching.containment import CONTAINMENT
from mpguard.watching.current import current, of_parent, set_current

if TYPE_CHECKING:
    from torch import nn


def watch(model: nn.Module | None = None, *, level: str = DEFAULT_WATCH_LEVEL, jsonl: str | None = None) -> None:
    """Watch the steps of this process from here on.

    model: the model that is trained, so that its first batch can be replayed too; by default models are found at the
    first step of their optimizer. level: "light" (default), "full", which waits for the device before each step and
    checks it before it is applied, or "off". jsonl: the file that steps and events are written to.

    Call it after the model was wrapped and compiled, if you give it. A second call replaces the first. Raises
    `ConfigError` for an unknown level, or a file that cannot be written.
    """
    checked = watch_level(level)
    finish()
    if checked == "off":
        return
    from mpguard.watching.session import Watch

    CONTAINMENT.forget()
    found = Watch(checked, jsonl)
    set_current(found)
    _register()
    patches.apply()
    if model is not None:
        with CONTAINMENT.contained("the search for modules"):
            found.follow(model)


def start(plan: Plan) -> None:
    """Start the watch that a plan asks for."""
    watch(level=plan.watch or DEFAULT_WATCH_LEVEL, jsonl=plan.watch_json)


@contextlib.contextmanager
def watching(plan: Plan) -> Iterator[None]:
    """Watch the block as a plan asks for."""
    start(plan)
    try:
        yield
    finally:
        finish()


@functools.cache
def _register() -> None:
    """Register handlers of the end of the process, and of forks; once per process."""
    atexit.register(finish)
    os.register_at_fork(after_in_child=_begin_again)


def _begin_again() -> None:
    parent = of_parent()
    if parent is not None:
        with CONTAINMENT.contained("the start of a process"):
            parent.begin_again()


def finish() -> None:
    """Report what is left of the current watch."""
    found = current()
    set_current(None)
    if found is not None:
        with CONTAINMENT.contained("the end of the run"), patches.no_grad():
            found.finish()
