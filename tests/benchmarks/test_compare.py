"""benchmarks/results/compare.json: how often `mpguard compare` is wrong, and what docs/compare.md states of it."""

from __future__ import annotations

import json
from typing import Any

from paths import REPOSITORY

RESULT: dict[str, Any] = json.loads((REPOSITORY / "benchmarks" / "results" / "compare.json").read_text("utf-8"))
PAGE = (REPOSITORY / "docs" / "compare.md").read_text("utf-8")


def counts(part: str, *kinds: str) -> list[int]:
    """Return how often each verdict was given, for pairs of the kinds that begin with one of some words."""
    total = dict.fromkeys(("same", "inconclusive", "different", "diverged"), 0)
    for kind, found in RESULT[part]["kinds"].items():
        if not kinds or kind.startswith(kinds):
            total = {verdict: count + found.get(verdict, 0) for verdict, count in total.items()}
    return list(total.values())


def test_pairs_without_a_difference_are_not_called_different() -> None:
    same, inconclusive, different, diverged = counts("null pairs")
    assert same + inconclusive + different + diverged == 100
    assert different + diverged <= 5


def test_all_that_diverged_are_found_and_nothing_one_per_cent_worse_is_called_the_same() -> None:
    assert counts("diverged") == [0, 0, 0, 30]
    assert counts("loss times 1.01")[0] == counts("spoiled", "bf16 weights", "5-bit products")[0] == 0


def test_the_page_states_what_was_measured() -> None:
    noise, bf16 = ("base again", "noise"), ("bf16",)
    rows = {
        "60 of one recipe": counts("null pairs", *noise),
        "20 of BF16": counts("null pairs", *bf16),
        "20 with other": counts("null pairs", "other"),
        "80 of the pairs": counts("loss times 1.01", *noise, *bf16),
        "10 of BF16 weights": counts("spoiled", "bf16 weights"),
        "10 of products": counts("spoiled", "e5m2"),
        "30 that diverged": counts("diverged"),
    }
    for start, expected in rows.items():
        line = next(line for line in PAGE.splitlines() if line.startswith(f"| {start}"))
        stated = [int(cell.strip(" *")) for cell in line.split("|")[2:-1]]
        assert stated == expected, line
    longer = RESULT["longer pairs that differ by noise"]["loss times 1.01"]
    tuned = RESULT["with the seeds that the test was made on"]["loss times 1.01"]
    outside = RESULT["loss times 1.01, beyond the margin by their means"]
    assert f"({longer['different']} of {sum(longer.values())})" in PAGE
    assert f"was made on {tuned['different']}," in PAGE and f"{outside} are outside of the margin" in PAGE
    alarms = RESULT["alarms of other tests on pairs that differ by noise"]
    for name, words in (("t-test, raw", "in {} %"), ("t-test, smoothed", "**{} %**"), ("blocks, no margin", "in {} %")):
        assert words.format(round(100 * alarms[name])) in PAGE, name
