"""The committed measurements of benchmarks/estimate.py, against what is estimated now."""

from __future__ import annotations

import json
from typing import Any

import pytest
from paths import REPOSITORY

import mpguard
from mpguard.estimate import ModelConfig, Request, built_in, estimate
from mpguard.estimate.estimate import CONTEXT, FRAGMENTS

RESULT = json.loads((REPOSITORY / "benchmarks/results/estimate.json").read_text(encoding="utf-8"))
CASES = {name: case for name, case in RESULT["cases"].items() if case["model"] in built_in()}


def request_of(case: dict[str, Any]) -> Request:
    """Return the request of a measured case, on the GPU it was measured on."""
    values = dict(built_in()[case["model"]])
    if case["layers"] is not None:
        values["num_hidden_layers"] = case["layers"]
    policy = mpguard.recipe(case["recipe"]).decided()
    return Request(
        ModelConfig(values, case["model"]), policy, case["strategy"], 1, case["batch"], case["length"],
        case["optimizer"], case["checkpointing"], case["compiled"], gpu="h200",
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_peaks_are_those_that_were_measured(name: str) -> None:
    case = CASES[name]
    error = estimate(request_of(case)).allocated / case["measured"] - 1
    assert abs(error) <= case["tolerance"], f"{100 * error:.1f} % of {case['measured']:,} bytes"


def test_the_context_and_the_fragments_are_those_that_were_measured() -> None:
    plain = [case for case in CASES.values() if case["strategy"] == "single"]
    assert (
        max(case["context_bytes"] for case in plain) <= CONTEXT <= 1.05 * max(case["context_bytes"] for case in plain)
    )
    shares = [case["trains_at"] for case in CASES.values() if "trains_at" in case]
    enough = [share for share in shares if share is not None and share <= FRAGMENTS]
    assert len(shares) >= 15 and len(enough) >= 0.8 * len(shares)
