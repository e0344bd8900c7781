"""The winner in mp.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpguard.document import mp_yaml, parse, read
from mpguard.tune.candidates import candidates
from mpguard.tune.write import with_winner, write

BF16 = """\
# ours
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'  # one process
mixed_precision: bf16
fp8_config:
  # the recipe
  mpguard_recipe: bf16_mixed  # as agreed
  mpguard_overrides: {grad_reduce_in_fp32: false}
machine_rank: 0
"""


def tuned(text: str, name: str, figures: str = "10 ms") -> str:
    document = parse(text, "mp.yaml", "yaml")
    policy = mp_yaml.policy_of(document)
    assert policy is not None
    winner = next(each for each in candidates(policy) if each.name == name)
    result = with_winner(document, winner, figures)
    assert mp_yaml.policy_of(parse(result, "mp.yaml", "yaml")) == winner.policy
    return result


def test_comments_are_kept_and_the_figures_are_one() -> None:
    text = tuned(BF16, "torchao-tensorwise+compile")
    new = [line for line in text.splitlines() if line not in BF16.splitlines()]
    assert new[:2] == ["mixed_precision: fp8", "  # mpguard tune: 10 ms"] and "fp8: hybrid" in new[2]
    assert text.splitlines().index(new[1]) + 1 == text.splitlines().index(new[2])
    assert "  backend: AO" in new, "what accelerate reads itself, as `mpguard apply` writes it"
    assert (
        "grad_reduce_in_fp32: false" in text and "  # the recipe\n  mpguard_recipe: bf16_mixed  # as agreed\n" in text
    )
    again = tuned(text, "bf16+compile", "9 ms")
    assert again.count("# mpguard tune:") == 1 and "# mpguard tune: 9 ms\n" in again


def test_overrides_without_effect_in_the_winner_are_removed() -> None:
    text = BF16.replace("bf16_mixed", "bf16_with_fp8_delayed_scaling_mixed").replace(
        "grad_reduce_in_fp32: false", "fp8_margin: 2, fp8_exclude: ['*head'], grad_reduce_in_fp32: false"
    )
    result = mp_yaml.stored(parse(tuned(text, "bf16+compile"), "mp.yaml", "yaml")).overrides
    assert result == {"grad_reduce_in_fp32": False, "fp8": None, "compile": True}


@pytest.mark.parametrize(
    "text",
    [
        "mixed_precision: bf16\nfp8_config: {mpguard_recipe: bf16_mixed}\n",
        "mixed_precision: bf16\r\nfp8_config:\r\n  mpguard_recipe: bf16_mixed\r\n",
    ],
)
def test_other_forms(text: str) -> None:
    result = tuned(text, "bf16+compile")
    assert result.count("# mpguard tune: 10 ms") == 1 and result.count("\r\n") in (0, result.count("\n"))


def test_json_has_no_comment(tmp_path: Path) -> None:
    path = tmp_path / "mp.json"
    path.write_text('{"mixed_precision": "bf16", "fp8_config": {"mpguard_recipe": "bf16_mixed"}}')
    policy = mp_yaml.load_policy(path)
    winner = next(each for each in candidates(policy) if each.name == "bf16+compile")
    write(path, winner, "10 ms")
    assert mp_yaml.policy_of(read(path)) == winner.policy and "tune" not in path.read_text()
