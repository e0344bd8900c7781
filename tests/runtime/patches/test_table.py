"""The table of patches, against the installed libraries and against one that has changed."""

from __future__ import annotations

import importlib
import logging
import re
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from mpguard.core import patches
from mpguard.core.patches import Patch
from mpguard.runtime.patches import table
from mpguard.runtime.proof.checks import model


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "not_applied", {})


def test_a_changed_target_is_not_patched_and_a_warning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def initialize(model: object, settings: object) -> None: ...

    module = ModuleType("deepspeed")
    module.initialize = initialize  # type: ignore[attr-defined]
    table.apply_patch(next(patch for patch in table.PATCHES if patch.target == "initialize"), module)
    assert module.initialize is initialize
    assert "deepspeed.initialize has no parameter args, config" in caplog.text
    assert (
        "DeepSpeed computes and reduces in the dtypes of its own config (tested with deepspeed 0.19, from 0.19.8 on)"
        in caplog.text
    )


def test_patches_that_lose_the_same_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A release of transformers in which every function that `attention_fix` decides in has another name."""
    caplog.set_level(logging.WARNING)
    attention = [each for each in table.PATCHES if each.module == "transformers.masking_utils"]
    assert len(attention) > 3
    for patch in attention:
        table.apply_patch(patch, ModuleType("transformers.masking_utils"))
    [line] = caplog.messages
    assert "attention may run with a mask: about 13 % slower in BF16 (tested with transformers 5.0 to 5.24)" in line
    assert patches.not_applied.keys() == {"attention may run with a mask: about 13 % slower in BF16"}
    [row] = model.not_applied(None, None)  # type: ignore[arg-type]
    assert row.name == "patches" and row.found.startswith("not applied: attention may run with a mask")


def test_every_adjustment_has_its_reason_and_one_that_does_not_fit_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for adjustment in table.ADJUSTMENTS:
        assert re.search(r"\(S\d+\)", adjustment.reason) and adjustment.lost, adjustment.what
        assert importlib.import_module(adjustment.module)
    option = next(each for each in table.ADJUSTMENTS if each.module == "torch._functorch.config")
    table._adjust(option, ModuleType("torch._functorch.config"))
    assert "backward_pass_autocast: there is no such option in the installed version" in caplog.text
    users = SimpleNamespace(backward_pass_autocast=[{"device_type": "cuda"}])
    assert option.apply(users) is None  # type: ignore[arg-type]
    assert users.backward_pass_autocast == [{"device_type": "cuda"}], "the user's own value is kept"


def test_every_entry_says_why_it_is_there_and_what_is_lost_without_it() -> None:
    for each in patches.PATCHES:
        assert each.reason and each.lost and each.check.__doc__, each.name
        assert each.package in ("os", "sys") or each.window is not None, each.name


def test_the_table_is_what_the_decorator_collected() -> None:
    def wrap(original: patches.AnyFunction) -> patches.AnyFunction:
        return original

    before = len(patches.PATCHES)
    decorate = patches.patch("json:dumps", needs=("obj",), reason="r", lost="l", check=lambda: None)
    try:
        assert decorate(wrap) is wrap
        found = patches.PATCHES[-1]
        assert isinstance(found, Patch)
        assert (found.module, found.target, found.name, found.package) == ("json", "dumps", "json.dumps", "json")
    finally:
        del patches.PATCHES[before:]
