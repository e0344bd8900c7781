"""A progress bar on stderr: on a terminal only, after a second, and removed at the end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpguard.core.console import rich_console

if TYPE_CHECKING:
    from rich.progress import Progress

    from mpguard.lint.run.workers import OnProgress

#: Seconds before the bar appears: most runs end sooner, and rich takes 0.05 s to import.
DELAY = 1.0


@contextlib.contextmanager
def bar(task: str = "checking", unit: str = "files") -> Iterator[OnProgress | None]:
    """Yield a callback for the number of finished files, or of another unit, and their total; None in pipes and CI."""
    if not _is_interactive():
        yield None
        return
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        progress: Progress | None = None

        def on_progress(done: int, total: int) -> None:
            nonlocal progress
            if progress is None and done < total and time.monotonic() - start >= DELAY:
                progress = stack.enter_context(_progress(unit))
                progress.add_task(task, total=total)
            if progress is not None:
                progress.update(progress.task_ids[0], completed=done)

        yield on_progress


def _is_interactive() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")


def _progress(unit: str) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    return Progress(*columns, console=rich_console(sys.stderr), transient=True)
