"""The public surface: names, the error tree, and what an import does not bring along."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
from limits import seconds

import mpguard
from mpguard.core import errors


def test_all_is_what_is_public() -> None:
    pytest.importorskip("torch", reason="the real library runs here")
    for name in mpguard.__all__:
        assert getattr(mpguard, name) is not None
    public = {
        name
        for name, value in vars(mpguard).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name not in ("annotations", "TYPE_CHECKING")
    }
    assert public <= set(mpguard.__all__)
    assert list(mpguard.__all__) == sorted(mpguard.__all__)


def returned_classes(function: Any) -> set[str]:
    """The names of mpguard's classes in the return annotation of a function."""
    names = re.findall(r"\w+", str(inspect.signature(function).return_annotation))
    found = [vars(sys.modules[function.__module__]).get(name) for name in names]
    return {each.__name__ for each in found if inspect.isclass(each) and each.__module__.startswith("mpguard")}


def test_all_has_every_class_that_a_public_function_returns() -> None:
    pytest.importorskip("torch", reason="the real library runs here")
    functions = [value for name in mpguard.__all__ if inspect.isfunction(value := getattr(mpguard, name))]
    returned = set().union(*map(returned_classes, functions))
    assert {"Conversion", "Policy", "Proof", "Change"} <= returned
    assert returned <= set(mpguard.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'recipies'"):
        mpguard.recipies  # noqa: B018


@pytest.mark.parametrize("given", [3, {"bf16": True}, object], ids=repr)
def test_every_function_that_takes_a_policy_refuses_other_values(given: Any) -> None:
    for name, call in {
        "recipe": mpguard.recipe,
        "activate": mpguard.activate,
        "prove": lambda policy: mpguard.prove(object(), None, policy),  # type: ignore[arg-type]
        "inject": lambda policy: mpguard.inject({}, policy, "deepspeed"),
    }.items():
        with pytest.raises(mpguard.PolicyError, match=f"^{name}: .* (is neither an mpguard.Policy|is not the name)"):
            call(given)


def test_inject_takes_a_recipes_name_and_a_mapping_alone() -> None:
    policy = mpguard.recipe("bf16_mixed")
    assert mpguard.inject({}, "bf16_mixed", "deepspeed") == mpguard.inject({}, policy, "deepspeed")
    with pytest.raises(mpguard.PolicyError, match="the config is a list; a mapping"):
        mpguard.inject([], policy, "deepspeed")  # type: ignore[arg-type]


def test_activate_accepts_three_enforce_values() -> None:
    with pytest.raises(mpguard.ConfigError, match="enforce is 'maybe'; it must be one of error, warn, off"):
        mpguard.activate("bf16_mixed", enforce="maybe")


def drawn() -> dict[str, str]:
    """Class -> parent, as drawn in the docstring of mpguard.core.errors."""
    parents: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^ {4}((?:[│ ]   )*(?:[├└]── )?)(\w+)", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        path = [(level, name) for level, name in path if level < depth]
        parents[match[2]] = path[-1][1] if path else ""
        path.append((depth, match[2]))
    return parents


def test_the_error_tree_is_as_drawn() -> None:
    classes = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, (Exception, Warning)) and value.__module__ == errors.__name__
    }
    real = {
        name: next((base.__name__ for base in value.__bases__ if base.__module__ == errors.__name__), "")
        for name, value in classes.items()
    }
    assert drawn() == real
    assert len(real) > 8


def test_the_base_classes_that_the_drawing_mentions() -> None:
    text = errors.__doc__ or ""
    for name in drawn():
        for other in re.findall(rf"{name} .*?\(?also an? (\w+)\)", text):
            assert issubclass(getattr(errors, name), eval(other)), f"{name} is not a {other}"
    assert issubclass(errors.MpguardWarning, UserWarning)
    assert issubclass(errors.PolicyError, ValueError)
    assert issubclass(errors.MissingExtra, ImportError)


def test_every_error_of_the_tree_is_public() -> None:
    assert set(drawn()) <= set(mpguard.__all__)


HEAVY = {"torch", "numpy", "transformers", "accelerate", "deepspeed", "torchao", "transformer_engine"}


def heavy_after(code: str) -> set[str]:
    """The heavy packages that a fresh interpreter has imported after running some code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules, sep='\\n')"],
        capture_output=True, text=True, timeout=seconds(120), check=True,
    )  # fmt: skip
    return HEAVY & set(done.stdout.splitlines())


@pytest.mark.parametrize(
    "code",
    [
        "import mpguard",
        "import mpguard; mpguard.Conversion, mpguard.Proof",
        "import mpguard; mpguard.recipe('bf16_mixed')",
        "import mpguard; mpguard.inject({}, mpguard.recipe('bf16_mixed'), 'deepspeed')",
        "import mpguard; [mpguard.inject({}, mpguard.recipe('bf16_mixed'), target)"
        " for target in mpguard.targets.plugins() if target not in ('te', 'torchao')]",
        "import mpguard.cli.lint",
    ],
)  # fmt: skip
def test_no_framework_is_imported(code: str) -> None:
    assert heavy_after(code) == set()


def test_that_test_can_fail() -> None:
    pytest.importorskip("torch", reason="the real library runs here")
    assert heavy_after("import mpguard; mpguard.recipe('bf16_mixed').to('fsdp2')") >= {"torch"}


def test_not_carried_names_field_value_target_and_carriers() -> None:
    warning = errors.NotCarried("hysteresis", 4, "torch", ["deepspeed", "megatron"])
    assert str(warning) == "torch: has no setting for `hysteresis=4` of the policy; supported by deepspeed, megatron"
    assert str(errors.NotCarried("fuse", True, "torch", [])).endswith("; no target supports it")
    assert (warning.field, warning.value, warning.target, warning.carriers) == (
        "hysteresis", 4, "torch", ("deepspeed", "megatron"),
    )  # fmt: skip
    several = errors.NotCarried("fp8", "e4m3", "torch", [], {"fp8_recipe": "mxfp8"})
    assert str(several) == (
        "torch: has no setting for `fp8=e4m3`, `fp8_recipe=mxfp8` of the policy; no target supports all of them"
    )
    assert several.fields == {"fp8": "e4m3", "fp8_recipe": "mxfp8"}


def test_what_is_not_carried_is_warned_at_the_callers_line() -> None:
    pytest.importorskip("torch", reason="the real library runs here")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mpguard.Policy(fp16=True, hysteresis=4).to("fsdp2")
        mpguard.inject({}, mpguard.Policy(fp16=True, hysteresis=4), "transformers")
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize(
    ("name", "known", "nearest"),
    [
        ("lauch", ["launch", "lint"], ["launch"]),
        ("params-dtype", ["params_dtype", "master_dtype"], ["params_dtype"]),
        ("BF16_MIXED", ["bf16_mixed", "fp32"], ["bf16_mixed"]),
        ("zzz", ["launch"], []),
        ("x", [], []),
    ],
)
def test_near_names(name: str, known: list[str], nearest: list[str]) -> None:
    assert errors.near(name, known)[:1] == nearest


def test_overrides_are_logged_at_warning_level(caplog: pytest.LogCaptureFixture) -> None:
    config = {"fp16": {"enabled": True}}
    with caplog.at_level("INFO", logger="mpguard"):
        mpguard.inject(config, mpguard.recipe("bf16_mixed"), "deepspeed")
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert levels["deepspeed: fp16.enabled: true -> false"] == "WARNING"
    assert levels["deepspeed: bf16.enabled: (absent) -> true"] == "INFO"
    assert config == {"fp16": {"enabled": True}}


def test_a_value_where_a_section_must_be_is_refused() -> None:
    with pytest.raises(mpguard.PolicyError, match="`bf16` is true; a section is needed there, to hold `enabled`"):
        mpguard.inject({"bf16": True}, mpguard.recipe("bf16_mixed"), "deepspeed")
