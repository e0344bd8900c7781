"""A progress bar on stderr, for runs that a person waits for: on a terminal, after a second, and gone at the end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.core.console import use_color

if TYPE_CHECKING:
    from rich.progress import Progress

    from mpguard.lint.run.workers import OnProgress

#: Seconds in which a run says nothing: most are over by then, and rich takes 0.05 s to import.
PATIENCE = 1.0


@contextlib.contextmanager
def bar() -> Iterator[OnProgress | None]:
    """What is to be on_progress how many files of how many are done. It says nothing where nobody looks: pipes, CI."""
    if not _somebody_looks():
        yield None
        return
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        shown: Progress | None = None

        def on_progress(done: int, total: int) -> None:
            nonlocal shown
            if shown is None and done < total and time.monotonic() - begun >= PATIENCE:
                shown = stack.enter_context(_made())
                shown.add_task("checking", total=total)
            if shown is not None:
                shown.update(shown.task_ids[0], completed=done)

        yield on_progress


def _somebody_looks() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")


def _made() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(file=sys.stderr, no_color=not use_color(sys.stderr))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("files"))
    return Progress(*columns, console=console, transient=True)
