"""`mpguard.watch`, and how a launched run starts the watch."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

from mpguard.core.watch_levels import DEFAULT_WATCH_LEVEL, watch_level
from mpguard.runtime.plan import Plan
from mpguard.watching import containment, patches
from mpguard.watching.current import current, set_current

if TYPE_CHECKING:
    from torch import nn

_registered = False


def watch(model: nn.Module | None = None, *, level: str = DEFAULT_WATCH_LEVEL, jsonl: str | None = None) -> None:
    """Watch the steps of this process from here on.

    model: the model that is trained, so that its first batch can be replayed too; by default models are found at the
    first step of their optimizer. level: "light" (default), "full", which waits for the device before each step and
    looks at it before it is applied, or "off". jsonl: the file that steps and events are written to.

    Call it after the model was wrapped and compiled, if you give it. A second call replaces the first. Raises
    `ConfigError` for an unknown level, or a file that cannot be written.
    """
    checked = watch_level(level)
    _finish()
    if checked == "off":
        return
    from mpguard.watching.session import Watch

    containment.reset()
    found = Watch(checked, jsonl)
    set_current(found)
    _register()
    patches.apply()
    if model is not None:
        with containment.contained("the search for modules"):
            found.follow(model)


def start(plan: Plan) -> None:
    """Start the watch that a plan asks for."""
    watch(level=plan.watch or DEFAULT_WATCH_LEVEL, jsonl=plan.watch_json)


def _register() -> None:
    global _registered  # noqa: PLW0603  handlers are registered once per process
    if not _registered:
        _registered = True
        atexit.register(_finish)
        os.register_at_fork(after_in_child=_begin_again)


def _begin_again() -> None:
    from mpguard.watching.current import of_parent

    parent = of_parent()
    if parent is not None:
        with containment.contained("the start of a process"):
            parent.begin_again()


def _finish() -> None:
    """Report what is left of the current watch."""
    found = current()
    set_current(None)
    if found is not None:
        with containment.contained("the end of the run"), patches.no_grad():
            found.finish()
