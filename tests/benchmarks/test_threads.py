"""Programs of public threads that run: what benchmarks/threads.py records of them, and one of them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="a program trains here")

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "threads.py"
_spec = importlib.util.spec_from_file_location("threads", PROGRAM)
assert _spec is not None and _spec.loader is not None
threads = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(threads)

RECORDED = json.loads(threads.RESULTS.read_text("utf-8"))["cases"]


def test_each_program_is_a_case_and_was_run() -> None:
    programs = {
        path.parent.name: json.loads(path.read_text("utf-8")) for path in threads.PROGRAMS.glob("*/program.json")
    }
    assert {name: each["outcome"] for name, each in programs.items()} == {
        name: each["outcome"] for name, each in RECORDED.items()
    }
    launch = {name: case["launch"] for name, case in threads.cases().items() if case["launch"]}
    assert launch == {name: each["message"] for name, each in RECORDED.items() if each["outcome"] in threads.CAUGHT}


def test_a_program_is_run_by_itself_and_under_mpguard() -> None:
    name = "t35-whole-loop-in-autocast"
    assert threads.launched(name, show=False) == RECORDED[name]
