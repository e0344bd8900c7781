"""Deviations that are wanted: their names, in every form in which they may be given."""

from __future__ import annotations

import pytest

from mpguard.core.errors import ConfigError
from mpguard.policy.allow import Allowance, allowances

FROZEN, HEAD = Allowance("frozen", "fp16"), Allowance("fp32", "*lm_head")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ()),
        ("local_sgd", (Allowance("local_sgd"),)),
        (["frozen: float16", "frozen:half"], (FROZEN,)),
        (["fp32: *lm_head", "local_sgd"], (HEAD, Allowance("local_sgd"))),
        ([{"frozen": "fp16"}, {"fp32": "*lm_head"}], (FROZEN, HEAD)),
        ({"fp32": ["*lm_head", "gate"], "local_sgd": None}, (HEAD, Allowance("fp32", "gate"), Allowance("local_sgd"))),
        ([FROZEN], (FROZEN,)),
        (["frozen: torch.int8", {"frozen": "int8"}], (Allowance("frozen", "int8"),)),
        (["states: bfloat16", {"states": "fp16"}], (Allowance("states", "bf16"), Allowance("states", "fp16"))),
    ],
)
def test_every_form_is_read(given: object, expected: tuple[Allowance, ...]) -> None:
    assert allowances(given) == expected
    assert allowances([str(each) for each in expected]) == expected, "the text form, which workers inherit"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("local_sdg", "there is no deviation `local_sdg`; did you mean `local_sgd`"),
        (["frozne: fp16"], "did you mean `frozen`"),
        ("frozen", "`frozen` has the value ''; a dtype is needed: `frozen: fp16`"),
        ("frozen: fp17", "allow: `frozen`: `fp17` is not a dtype"),
        ("states: int8", "allow: `states`: `int8` is not a dtype"),
        ("local_sgd: 8", "`local_sgd` has the value '8'; nothing may follow the name"),
        ({"fp32": 1.5}, "a pattern of module names is needed"),
        ([3], "3 is not the name of a deviation"),
        (3, "a list is needed"),
    ],
)
def test_an_unknown_deviation_is_refused_with_similar_names(given: object, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        allowances(given)
    assert message in str(raised.value)
