"""Predictions of FP8's speed: the table of the package is that of the measurements, and `auto` decides by it."""

from __future__ import annotations

import json
import sys

import pytest
from paths import REPOSITORY

import mpguard
from mpguard.policy import speed

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import fp8_table

MEASURED = json.loads((REPOSITORY / "benchmarks/results/fp8_table.json").read_text(encoding="utf-8"))
AUTO = mpguard.recipe("bf16_with_fp8_current_scaling_mixed").replace(fp8="auto", fp8_param=False)


def block(hidden: int, ffn: int) -> list[tuple[int, int]]:
    return [(hidden, hidden)] * 2 + [(hidden, ffn)] * 2 + [(ffn, hidden)]


def test_the_table_of_the_package_is_what_was_measured() -> None:
    assert json.loads(fp8_table.PREDICTIONS.read_text(encoding="utf-8")) == fp8_table.predictions(MEASURED)


def test_the_page_has_the_table() -> None:
    page = (REPOSITORY / "docs/fp8.md").read_text(encoding="utf-8")
    ratios = list(fp8_table.predictions(MEASURED)["ratios"].values())
    for row in MEASURED["rows"]:
        figures = [each[str(row["hidden"])][str(row["tokens"])] for each in ratios]
        assert f"| {row['hidden']} | {row['tokens']:,} | {' | '.join(f'{each:.2f}' for each in figures)} |" in page


@pytest.mark.parametrize("row", MEASURED["rows"], ids=lambda row: f"{row['size']}-{row['tokens']}")
def test_what_is_chosen_was_never_slower(row: dict[str, object]) -> None:
    layers = block(int(str(row["hidden"])), int(str(row["ffn"])))
    found = speed.predict(AUTO, "torchao", layers, int(str(row["tokens"])))
    lowest, highest = row["lowest"], row["highest"]
    assert found is not None and isinstance(lowest, dict) and isinstance(highest, dict)
    if found.pays:
        assert lowest["bf16"] > highest["torchao, wide layers"], "by the whole intervals"


@pytest.mark.parametrize(
    ("hidden", "ffn", "tokens", "pays"),
    [
        (2048, 8192, 2048, False), (768, 3072, 16384, False), (768, 3072, 1024, False), (4096, 14336, 8192, True),
        (2048, 8192, 8192, True), (3072, 8192, 8192, True), (4096, 14336, 1024, False), (512, 2048, 10**6, False),
        (8192, 28672, 10**6, True), (4096, 14336, None, True), (1536, 6144, None, False),
    ],
)  # fmt: skip
def test_between_and_outside_of_the_table(hidden: int, ffn: int, tokens: int | None, pays: bool) -> None:
    found = speed.predict(AUTO, "torchao", block(hidden, ffn), tokens)
    assert found is not None and found.pays is pays and found.width == hidden


def test_what_was_not_measured_is_not_predicted() -> None:
    layers = block(4096, 14336)
    for policy in (
        AUTO.replace(compile=False), AUTO.replace(fp8_emulate=True), mpguard.recipe("bf16_mixed"),
        mpguard.recipe("bf16_with_fp8_delayed_scaling_mixed"), mpguard.recipe("bf16_with_fp8_rowwise_mixed"),
    ):  # fmt: skip
        assert speed.predict(policy, "torchao", layers, 16384) is None
    assert speed.predict(AUTO, "torchao", [], 16384) is None


def test_fp8_auto_is_a_wish() -> None:
    policy = mpguard.Policy(bf16=True, fp8="auto")
    assert (policy.fp8, policy.fp8_required) == ("hybrid", False)
    assert mpguard.recipe("hopper_bf16_with_fp8_mixed").replace(fp8="auto").fp8_required is False
