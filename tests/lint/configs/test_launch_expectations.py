"""The precision of a script's launch configs, compared with its code."""

from __future__ import annotations

from pathlib import Path

import pytest
from lint_facts import facts_of

from mpguard.lint import Dtype, Facts, launch_expectations
from mpguard.lint.facts.program.dtypes import AnyDtype, OtherDtype
from mpguard.lint.facts.syntax.path_condition import ALWAYS, Flag, PathCondition
from mpguard.lint.project.launch_configs import LaunchConfig, launch_config
from mpguard.lint.project.project import Project
from mpguard.lint.source.source import Source


def launched(folder: Path, *modes: str, code: str = "import accelerate\n") -> tuple[Facts, tuple[LaunchConfig, ...]]:
    """Return the facts of a script, and its configs: one file for each mode."""
    (folder / "pyproject.toml").touch()
    given = []
    for number, mode in enumerate(modes):
        path = folder / f"mp{number}.yaml"
        path.write_text(f"distributed_type: MULTI_GPU\nmixed_precision: {mode}\n")
        given.append(launch_config(path))
    facts = Facts(Source.parse(code.encode(), str(folder / "train.py")), Project(given))
    return facts, launch_expectations.configs(facts)


@pytest.mark.parametrize(
    ("modes", "fp16", "bf16"),
    [
        (("bf16",), True, False),
        (("fp16",), False, True),
        (("fp8",), True, False),  # an FP8 run computes the rest in BF16
        (("bf16", "fp8"), True, False),
        (("bf16", "fp16"), False, False),
        (("'no'",), False, False),
        (("bf16", "'no'"), False, False),
    ],
)
def test_a_dtype_contradicts_configs_if_none_computes_in_it(
    tmp_path: Path, modes: tuple[str, ...], fp16: bool, bf16: bool
) -> None:
    _, configs = launched(tmp_path, *modes)
    assert len(configs) == len(modes)
    assert launch_expectations.contradicts(Dtype.FP16, configs) is fp16
    assert launch_expectations.contradicts(Dtype.BF16, configs) is bf16


def test_a_config_without_a_precision_expects_nothing(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    project = Project([launch_config(tmp_path / "other.yaml")])
    facts = Facts(Source.parse(b"import accelerate\n", str(tmp_path / "train.py")), project)
    assert facts.project.configs_for(facts.path)
    assert launch_expectations.configs(facts) == ()


def test_modes_and_places_are_named_once(tmp_path: Path) -> None:
    _, configs = launched(tmp_path, "bf16", "fp8", "bf16")
    assert launch_expectations.wanted(configs) == "`bf16` or `fp8`"
    notes = launch_expectations.places(configs)
    assert [note.message for note in notes] == [f"the config sets `{mode}`" for mode in ("bf16", "fp8", "bf16")]
    for note, config in zip(notes, configs, strict=True):
        assert note.path == config.path
        assert note.span is not None
        assert Path(config.path).read_text()[slice(*note.span)] == "mixed_precision"


@pytest.mark.parametrize(
    ("dtypes", "low"),
    [
        ([Dtype.FP16], Dtype.FP16),
        ([Dtype.BF16, Dtype.BF16], Dtype.BF16),
        ([Dtype.FP16, Dtype.BF16], None),
        ([Dtype.FP16, None], None),
        ([Dtype.FP32], None),
        ([OtherDtype.INT64], None),
        ([], None),
    ],
)
def test_the_only_low_dtype(dtypes: list[AnyDtype | None], low: Dtype | None) -> None:
    assert launch_expectations.low(tuple((ALWAYS, dtype) for dtype in dtypes)) is low


@pytest.mark.parametrize(
    ("flag", "name", "expected"),
    [
        ("", "main", True),
        ("args.resume", "main", True),
        ("args.fp16", "main", False),
        ("use_amp", "main", False),
        ("example", "main", True),
        ("", "train_fp16", False),
        ("", "AMPOptimizer", False),
    ],
)
def test_code_that_an_option_for_the_precision_selects_is_conditional(flag: str, name: str, expected: bool) -> None:
    facts = facts_of(f"def {name}():\n    use()\n")
    guard = PathCondition([Flag(flag)]) if flag else ALWAYS
    assert launch_expectations.is_unconditional(guard, facts.calls["use"][0]) is expected
    assert launch_expectations.is_unconditional(guard, None) is (not flag or flag in ("args.resume", "example"))


@pytest.mark.parametrize(
    ("code", "text"), [("use('FP16')", "fp16"), ("use(x)", None), ("use('a' if x else 'b')", None)]
)
def test_a_literal_is_the_only_value(code: str, text: str | None) -> None:
    facts = facts_of(code)
    (call,) = facts.calls["use"]
    assert launch_expectations.literal(facts.evaluate(call.positional[0], call)) == text
