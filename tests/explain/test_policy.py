"""The settings of a run under a policy: a recipe per module has a row for each pattern, with its line."""

from __future__ import annotations

from pathlib import Path

from mpguard.explain import policy as in_policy
from mpguard.explain.inputs import gather

TEXT = """\
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: bf16
fp8_config:
  mpguard_recipe: hopper_bf16_with_fp8_mixed
  mpguard_overrides: {backend: torchao}
  mpguard_allow: [local_sgd]
  mpguard_fp8_modules:
    - {pattern: "model.layers.0.*", recipe: none}
    - pattern: "*.mlp.*"
      recipe: rowwise
"""


def test_each_pattern_of_a_recipe_per_module_has_its_line_in_order(tmp_path: Path) -> None:
    (tmp_path / "mp.yaml").write_text(TEXT)
    found = in_policy.policy_of(gather([tmp_path / "mp.yaml"], environment={}))
    assert found is not None
    settings = [each for each in in_policy.fields(found) if each.key.startswith("fp8_modules")]
    assert [(each.key, each.value, each.origin.line, each.origin.layer) for each in settings] == [
        ("fp8_modules[model.layers.0.*]", "none", 9, "override"),
        ("fp8_modules[*.mlp.*]", "rowwise", 10, "override"),
    ]
