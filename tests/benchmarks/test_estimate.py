"""The committed measurements of benchmarks/estimate.py, against what is estimated now."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from paths import REPOSITORY

from mpguard.estimate import estimate
from mpguard.estimate.estimate import CONTEXT

_spec = importlib.util.spec_from_file_location("benchmark_of_estimate", REPOSITORY / "benchmarks" / "estimate.py")
assert _spec is not None and _spec.loader is not None
benchmark = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = benchmark  # its dataclasses look for their module
_spec.loader.exec_module(benchmark)

MEASURED = json.loads((REPOSITORY / "benchmarks/results/estimate.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("name", benchmark.CASES)
def test_peaks_are_those_that_were_measured(name: str) -> None:
    case, measured = benchmark.CASES[name], MEASURED[name]["measured"]
    error = estimate(benchmark.request_of(case, case.config())).allocated / measured - 1
    assert abs(error) <= case.tolerance, f"{100 * error:.1f} % of {measured:,} bytes"


def test_the_context_and_the_fragments_are_those_that_were_measured() -> None:
    plain = [case for case in MEASURED.values() if case["strategy"] == "single"]
    most = max(case["context_bytes"] for case in plain)
    assert most <= CONTEXT <= 1.05 * most
    limited = {name: case["trains_at"] for name, case in MEASURED.items() if "trains_at" in case}
    enough, too_little = [], []
    for name, trains_at in limited.items():
        found = estimate(benchmark.request_of(benchmark.CASES[name], benchmark.CASES[name].config()))
        counted = round((found.needed - found.per_gpu["context"]) / found.allocated, 4)
        enough += [name] if trains_at is not None and trains_at <= counted else []
        lost = [share for share in benchmark.SHARES if trains_at is None or share < trains_at]
        too_little += [name] if lost[-1] >= counted else []
    assert len(limited) == 17 and len(enough) >= 14
    assert too_little == ["llama-zero2"], "what is counted for fragments was shown to be too little"
