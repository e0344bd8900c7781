"""Which files are tests or benchmarks: their loops check or measure something, and what they train is thrown away."""

from __future__ import annotations

import os

#: Folders of tests, and of scripts that are profiled: the file's own, and two above.
_FOLDERS = frozenset({"test", "tests", "profiling"})
#: Words in the names of scripts that measure the speed of a training step.
_MEASURES = frozenset({"bench", "benchmark", "measure", "profile"})


def is_test(path: str) -> bool:
    """True for a test or a benchmark, by the names of the file and of its folders."""
    *folders, name = path.replace(os.sep, "/").split("/")
    stem = name.partition(".")[0]
    return (
        stem.startswith(("test_", "conftest"))
        or not _FOLDERS.isdisjoint(folders[-3:])
        or not _MEASURES.isdisjoint(stem.split("_"))
    )
