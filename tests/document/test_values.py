"""Values of configs as programs parse them, and the known key that a misspelt one stands for."""

from __future__ import annotations

import pytest

from mpguard.document.values import misspelling_of


@pytest.mark.parametrize(
    ("key", "found"),
    [("bf61", "bf16"), ("zero_optimisation", "zero_optimization"), ("zzz", None), ("fp1", None), ("fp16", None)],
)
def test_a_misspelling_stands_for_one_known_key(key: str, found: str | None) -> None:
    """`fp1` is as close to `fp16` as to `fp12`: neither is proposed."""
    assert misspelling_of(key, ["bf16", "zero_optimization", "fp16", "fp12"], 0.75) == found


def test_swapped_letters_and_underscores_are_clear_among_similar_keys() -> None:
    known = ["fp8_param_gather", "fp4_param_gather"]
    assert misspelling_of("fp8param_gahter", known) == "fp8_param_gather"
    assert misspelling_of("fp_param_gather", known) is None
