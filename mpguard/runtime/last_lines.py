"""The last lines of a launch: `mpguard launch` prints why a run was refused after its workers have ended, once.

What a worker prints itself stands above the lines of torchrun, and without a process group each rank prints it. So a
worker that has this launcher writes the text into a folder instead, one file per rank.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mpguard.core.console import print_line
from mpguard.runtime.ranks import rank

#: The variable with the folder that workers write to.
VARIABLE = "MPGUARD_LAST_LINES"


def print_last(text: str) -> None:
    """Print a text, or leave it to the launcher of this process. A rank leaves one: its first is the cause."""
    folder = os.environ.get(VARIABLE)
    if folder:
        with contextlib.suppress(FileExistsError):
            try:
                with Path(folder, f"{rank():06}").open("x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                raise
            except OSError:
                print_line(text)
        return
    print_line(text)


@contextlib.contextmanager
def printed_at_the_end() -> Iterator[None]:
    """Collect the last lines of the workers that are started in this context, and print each text once at its end."""
    with tempfile.TemporaryDirectory(prefix="mpguard-", ignore_cleanup_errors=True) as folder:
        os.environ[VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            texts = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).iterdir())]
            for text in dict.fromkeys(texts):
                print_line(text)
