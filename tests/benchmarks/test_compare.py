"""benchmarks/results/compare.json: how often `mpguard compare` is wrong, and what docs/compare.md states of it."""

from __future__ import annotations

import json
from typing import Any

from paths import REPOSITORY

RESULT: dict[str, Any] = json.loads((REPOSITORY / "benchmarks" / "results" / "compare.json").read_text("utf-8"))
PAGE = (REPOSITORY / "docs" / "compare.md").read_text("utf-8")
VERDICTS = ("same", "inconclusive", "different", "diverged")
NOISE, BF16 = ("base again", "noise"), ("bf16",)


def counts(part: str, *kinds: str) -> list[int]:
    """Return how often each verdict was given, for pairs of the kinds that begin with one of some words."""
    total = dict.fromkeys(VERDICTS, 0)
    for kind, found in RESULT[part]["kinds"].items():
        if not kinds or kind.startswith(kinds):
            total = {verdict: count + found.get(verdict, 0) for verdict, count in total.items()}
    return list(total.values())


def test_pairs_without_a_difference_are_not_called_different() -> None:
    same, inconclusive, different, diverged = counts("null pairs")
    assert same + inconclusive + different + diverged >= 200
    assert different + diverged <= 0.05 * (same + inconclusive)


def test_intervals_are_wrong_as_often_as_they_state() -> None:
    assert RESULT["intervals that are wrong"]["found"] <= RESULT["intervals that are wrong"]["stated"] == 0.1


def test_all_that_diverged_are_found_and_nothing_one_per_cent_worse_is_called_the_same() -> None:
    assert counts("diverged")[:3] == [0, 0, 0] and counts("diverged")[3] >= 60
    for part in ("loss times 1.01", "loss times 0.99", "every tenth step, loss times 1.01"):
        assert counts(part)[0] == 0, part


def test_the_page_states_what_was_measured() -> None:
    rows = {
        "of one recipe": counts("null pairs", *NOISE),
        "of BF16 with BF16": counts("null pairs", *BF16),
        "with other starting weights": counts("null pairs", "other"),
        "of the pairs of the first two rows, loss times 1.01": counts("loss times 1.01", *NOISE, *BF16),
        "of the pairs of the first two rows, loss times 0.99": counts("loss times 0.99"),
        "of the first two rows, logged every tenth step": counts("every tenth step"),
        "of the same, loss times 1.01": counts("every tenth step, loss times 1.01"),
        "of BF16 weights": counts("spoiled", "bf16 weights"),
        "of products": counts("spoiled", "e5m2"),
        "that diverged": counts("diverged"),
    }
    for words, expected in rows.items():
        line = next(line for line in PAGE.splitlines() if line.startswith(f"| {sum(expected)} {words}"))
        stated = [int(cell.strip(" *")) for cell in line.split("|")[2:-1]]
        assert stated == expected, line
    outside = RESULT["loss times 1.01, beyond the margin by their means"]
    assert f"{outside} are outside of the margin" in PAGE
    for part, found in RESULT["parts"].items():
        worse, better = (found[f"loss times {factor}"]["different"] for factor in ("1.01", "0.99"))
        assert f"| {part} | {worse} | {better} |" in PAGE
    wrong = RESULT["intervals that are wrong"]["found"]
    assert f"{100 * wrong:.1f} %" in PAGE
    alarms = RESULT["alarms of other tests on pairs that differ by noise"]
    for name, words in (("t-test, raw", "in {} %"), ("t-test, smoothed", "**{} %**"), ("blocks, no margin", "in {} %")):
        assert words.format(round(100 * alarms[name])) in PAGE, name
