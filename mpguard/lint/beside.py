"""The Python code that lies beside a config: where nothing says what a config launches, it may be any of it."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from mpguard.lint.gate import stripped

#: Files of a folder, and bytes of a file, that are looked at: enough for a project, bounded for a heap.
MOST_FILES, LARGEST = 60, 256 << 10


def mentions(config: str, pattern: str) -> bool:
    """Whether code in the folder of a config, or in the one above it, matches a pattern outside comments."""
    folder = Path(config).absolute().parent
    found = re.compile(pattern.encode())
    return any(found.search(code) for place in (folder, folder.parent) for code in _code(place))


@functools.cache
def _code(folder: Path) -> tuple[bytes, ...]:
    try:
        files = sorted(
            entry.path
            for entry in os.scandir(folder)
            if entry.name.endswith(".py") and entry.is_file() and entry.stat().st_size <= LARGEST
        )
        return tuple(stripped(Path(path).read_bytes()) for path in files[:MOST_FILES])
    except OSError:
        return ()
