"""Libraries outside of the versions that were tested: one line each; a refusal for a patch that the policy needs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mpguard.core.errors import NotInForce
from mpguard.core.tested import TESTED, Window
from mpguard.policy.recipes import recipe
from mpguard.runtime import activation
from mpguard.runtime.patches import fit, windows
from mpguard.runtime.plan import Plan

MASKS = """
def _ignore_causal_mask_sdpa(padding_mask, q_length, kv_length, local_attention_size=None): ...
def find_packed_sequences(position_ids): ...
def create_causal_mask(config): ...
def create_sliding_window_causal_mask(config): ...
def create_chunked_causal_mask(config): ...
"""
ENGINE = "class DeepSpeedEngine(Module):\n    def step(self): ...\n"


def _package(folder: Path, name: str, text: str) -> None:
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for parent in path.relative_to(folder).parents:
        if str(parent) != ".":
            (folder / parent / "__init__.py").touch()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    _package(tmp_path, "transformers.masking_utils", MASKS)
    _package(tmp_path, "transformers.integrations.moe", "def _grouped_mm(input, weight, offs): ...\n")
    deepspeed = "class HfTrainerDeepSpeedConfig:\n    def trainer_config_process(self, args): ...\n"
    _package(tmp_path, "transformers.integrations.deepspeed", deepspeed)
    trainer = "    def _save_optimizer_and_scheduler(self, output_dir): ...\n"
    trainer += "    def _load_optimizer_and_scheduler(self, checkpoint): ...\n"
    _package(tmp_path, "transformers.trainer", f"class Trainer:\n{trainer}")
    _package(tmp_path, "deepspeed.runtime.engine", ENGINE)
    _package(tmp_path, "deepspeed.runtime.torch_autocast", "def autocast_if_enabled(engine): ...\n")
    (tmp_path / "deepspeed/__init__.py").write_text("def initialize(model, settings): ...\n")
    return tmp_path


def test_a_newer_library_is_one_line_with_what_is_lost(site: Path) -> None:
    [found] = windows.inspect({"transformers": "99.1.0"}, [str(site)])
    assert found.place == "newer"
    assert found.line() == (
        f"transformers 99.1.0: newer than tested ({TESTED['transformers']}); patches that apply: 8 of 9, not: "
        "find_packed_sequence_indices (attention may run with a mask: about 13 % slower in BF16)"
    )
    assert list(found.refusals(recipe("bf16_mixed"), "single")) == [], "no policy needs it"
    data = found.as_json()
    assert (data["place"], data["patches"]) == ("newer", 9)
    assert [each["patch"] for each in data["not_applied"]] == [
        "transformers.masking_utils.find_packed_sequence_indices"
    ]


def test_a_patch_that_the_policy_needs_is_a_refusal_that_names_it(site: Path) -> None:
    [found] = windows.inspect({"deepspeed": "0.1.0"}, [str(site)])
    assert found.place == "older"
    assert "older than tested" in (found.line() or "") and "2 of 3" in (found.line() or "")
    [reason] = found.refusals(recipe("bf16_mixed"), "deepspeed-zero2")
    assert "deepspeed.initialize has no parameter args, config" in reason
    assert "DeepSpeed computes and reduces in the dtypes of its own config" in reason
    assert list(found.refusals(recipe("bf16_mixed"), "ddp")) == []


def test_a_patch_that_the_policy_needs_is_a_refusal_inside_the_window_too(site: Path) -> None:
    inside = {"deepspeed": f"{TESTED['deepspeed'].newest}.99"}
    policy = recipe("bf16_mixed")
    [found] = windows.inspect(inside, [str(site)], windows.needed_by(policy, "deepspeed-zero2"))
    assert found.place == "inside"
    [reason] = found.refusals(policy, "deepspeed-zero2")
    assert "deepspeed.initialize has no parameter args, config" in reason and "Install a version" in reason
    assert windows.inspect(inside, [str(site)], windows.needed_by(policy, "ddp")) == []


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [("deepspeed-zero2", {}), ("ddp", {"strategy": "ddp"}), ("activate()", {"strategy": None}),
     ("checked by launch", {"announced": True}), ("warn", {"enforce": "warn"})],
)  # fmt: skip
def test_a_script_that_launch_did_not_start_is_refused_for_the_same_patches(
    strategy: str, changes: dict[str, Any], site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the name of the engine the proof compares what the engine does."""
    pytest.importorskip("deepspeed")
    monkeypatch.syspath_prepend(str(site))

    def check(plan: Plan) -> None:
        activation.check_start(plan, activation.libraries_to_compare(plan), launched=False)

    plan = Plan(recipe("bf16_mixed"), strategy="deepspeed-zero2")
    if not changes:
        with pytest.raises(NotInForce, match=r"deepspeed\.initialize has no parameter args, config"):
            check(plan)
    check(dataclasses.replace(plan, **(changes or {"enforce": "off"})))


def test_an_adjustment_whose_option_is_gone_is_read_without_an_import(tmp_path: Path) -> None:
    _package(tmp_path, "torch._functorch.config", "other_option = 1\n")
    [found] = windows.inspect({"torch": "99.0"}, [str(tmp_path)])
    lost = {each.patch.name: each.reason for each in found.lost}
    option = "torch._functorch.config.backward_pass_autocast"
    assert lost[option] == "there is no backward_pass_autocast in torch._functorch.config"
    _package(tmp_path, "torch._functorch.config", "backward_pass_autocast: str = 'same_as_forward'\n")
    fit._definitions.cache_clear()
    [found] = windows.inspect({"torch": "99.0"}, [str(tmp_path)])
    assert option not in {each.patch.name for each in found.lost}


def test_a_tested_version_is_no_line_and_is_not_read_by_launch(site: Path) -> None:
    inside = {"transformers": "5.17.0"}
    assert windows.inspect(inside, [str(site)], windows.needed_by(recipe("bf16_mixed"), "deepspeed-zero2")) == []
    [found] = windows.inspect(inside, [str(site)])
    assert found.place == "inside" and (found.line() or "").startswith("transformers 5.17.0: tested (5.0 to 5.24);")
    assert windows.inspect({}, [str(site)]) == []


@pytest.mark.parametrize(
    ("version", "place"),
    [
        ("5.24.3", "inside"), ("5.25.0.dev0", "newer"), ("5.0.0", "inside"), ("4.57.6", "older"), ("6.0", "newer"),
        ("2.13.0+cpu", "older"), ("unknown", "inside"),
    ],
)  # fmt: skip
def test_versions_are_compared_by_minor_release(version: str, place: str) -> None:
    assert Window("5.0", "5.24").place(version) == place


def test_the_installed_libraries_are_inside_and_every_patch_applies() -> None:
    import sys

    for found in windows.inspect(windows.installed_versions(), sys.path):
        for lost in found.lost:  # a patch of a later version than the oldest: `make test-oldest` has one of those
            window = lost.patch.window
            assert window is not None and window.place(found.version) == "older", lost
        assert found.place == "inside" and (found.line() is None) == (not found.lost)
