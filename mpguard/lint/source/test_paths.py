"""Which files are tests or benchmarks: their loops check or measure something, and what they train is thrown away."""

from __future__ import annotations

import os
import re

from mpguard.core.lazy_pattern import lazy_pattern

#: Folders of tests, and of scripts that measure speed: the file's own, and two above. `benchmarks` is missing, which
#: often has the training of models that are compared.
_FOLDERS = frozenset({"test", "tests", "perf", "performance", "profiling"})
#: Words in the names of scripts that measure the speed of a training step.
_MEASURES = frozenset({"bench", "benchmark", "measure", "profile"})
#: What makes a file with a name like `checkpoint_test.py`, which pytest collects, a test: a model's test may train it.
_TESTS = lazy_pattern(rb"^[ \t]*(?:import|from)[ \t]+(?:pytest|unittest|absl\.testing|torch\.testing)\b", re.M)

_TEST = lazy_pattern(rb"^[ \t]*(?:async[ \t]+)?def[ \t]+test|\bTestCase\b", re.M)


def is_test(path: str, code: bytes = b"") -> bool:
    """True for a test or a benchmark, by the names of the file and of its folders, and by its code if that is given."""
    *folders, name = path.replace(os.sep, "/").split("/")
    stem = name.partition(".")[0]
    return (
        stem.startswith(("test_", "conftest"))
        or not _FOLDERS.isdisjoint(folders[-3:])
        or not _MEASURES.isdisjoint(stem.split("_"))
        or (stem.endswith("_test") and _TESTS.search(code) is not None)
    )


def is_unit_test(path: str, code: bytes) -> bool:
    """True for a file in a folder `tests`, and for one that imports a library of tests and has one: no program."""
    in_folder = "tests" in path.replace(os.sep, "/").split("/")[:-1]
    return in_folder or (_TESTS.search(code) is not None and _TEST.search(code) is not None)
