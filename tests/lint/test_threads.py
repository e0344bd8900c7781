"""Precision problems from public threads that a rule reports stay reported (benchmarks/threads.py has the cases)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mpguard.lint.model.selection import Selectors

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "threads.py"
_spec = importlib.util.spec_from_file_location("threads", PROGRAM)
assert _spec is not None and _spec.loader is not None
threads = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(threads)

CAUGHT = {name: case for name, case in threads.cases().items() if case["codes"]}


@pytest.mark.parametrize("name", CAUGHT)
def test_the_mistake_of_the_thread_is_found(name: str) -> None:
    found = {finding.code for finding in threads.findings(name, Selectors())}
    assert set(CAUGHT[name]["codes"]) <= found
