"""The proposal: which layers get another recipe, in few patterns, and what it costs."""

from __future__ import annotations

import pytest
from sensitivity_lines import FORMATS, layer, layers

from mpguard.nn.format_names import default_bound
from mpguard.numerics.proposal import Proposal
from mpguard.numerics.report import gathered
from mpguard.policy.fp8_modules import module_recipes
from mpguard.policy.recipes import recipe

NAMES = [f"blocks.{i}.{kind}" for i in range(3) for kind in ("qkv", "up", "down")]


def proposed(bad: dict[str, object], finer: tuple[str, ...] = (), bound: float | None = None) -> Proposal:
    lines = [layers(*NAMES, "lm_head", left_out={"lm_head": "fp8_exclude"})]
    for name in (*NAMES, "lm_head"):
        given = bad.get(name, {})
        lines.append(layer(name, **(given if isinstance(given, dict) else {"tensorwise": given})))
    return gathered(lines, "tensorwise", FORMATS).propose(bound, finer)


def test_nothing_is_proposed_if_all_layers_keep_the_bound() -> None:
    found = proposed({"lm_head": 3.0})
    assert (found.modules, found.share, found.worst) == ((), 1.0, 28.5)
    assert found.bound == default_bound("tensorwise") == 20.0


def test_one_layer_is_named() -> None:
    found = proposed({"blocks.1.down": 12.0})
    assert [dict(each) for each in found.modules] == [{"pattern": "blocks.1.down", "recipe": "none"}]
    assert found.share == pytest.approx(8 / 9)
    assert found.worst == 28.5


def test_layers_of_all_blocks_are_one_pattern() -> None:
    found = proposed({f"blocks.{i}.down": 12.0 for i in range(3)})
    assert [dict(each) for each in found.modules] == [{"pattern": "blocks.*.down", "recipe": "none"}]
    assert found.share == pytest.approx(6 / 9)


def test_a_pattern_matches_no_layer_that_stays() -> None:
    found = proposed({"blocks.0.down": 12.0, "blocks.2.down": 12.0})
    assert [each["pattern"] for each in found.modules] == ["blocks.0.down", "blocks.2.down"]


def test_a_finer_recipe_comes_before_none() -> None:
    bad = {"blocks.0.up": {"tensorwise": 9.0}, "blocks.1.up": {"tensorwise": 9.0, "rowwise": 19.0}}
    found = proposed(bad, ("rowwise",))
    assert found.choices["blocks.0.up"] == "rowwise"
    assert found.choices["blocks.1.up"] == "none"
    assert found.share == pytest.approx(8 / 9)


def test_the_bound_is_what_was_asked_for() -> None:
    found = proposed({}, bound=28.6)
    assert found.share == 0.0
    assert found.worst is None


def test_a_policy_accepts_the_proposal() -> None:
    found = proposed({"blocks.1.down": 12.0, **{f"blocks.{i}.qkv": 3.0 for i in range(3)}})
    policy = recipe("bf16_with_fp8_current_scaling_mixed").replace(fp8_modules=[dict(each) for each in found.modules])
    assert policy.fp8_modules == module_recipes(found.modules)
    assert found.as_json()["fp8_modules"] == [each.plain() for each in policy.fp8_modules]
