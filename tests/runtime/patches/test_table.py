"""The table of patches, against the installed libraries and against one that has changed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from mpguard.runtime.patches import table
from mpguard.watching import patches as watching


def test_a_changed_target_is_not_patched_and_a_warning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def initialize(model: object, settings: object) -> None: ...

    module = ModuleType("deepspeed")
    module.initialize = initialize  # type: ignore[attr-defined]
    table.apply_patch(next(patch for patch in table.PATCHES if patch.target == "initialize"), module)
    assert module.initialize is initialize
    assert "deepspeed.initialize has no parameter args, config" in caplog.text and "the proof shows" in caplog.text


def test_every_adjustment_has_its_reason_and_one_that_does_not_fit_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for adjustment in table.ADJUSTMENTS:
        assert re.search(r"\(S\d+\)", adjustment.reason), adjustment.what
        assert importlib.import_module(adjustment.module)
    option = next(each for each in table.ADJUSTMENTS if each.module == "torch._functorch.config")
    table._adjust(option, ModuleType("torch._functorch.config"))
    assert "backward_pass_autocast: there is no such option in the installed version: not changed" in caplog.text
    users = SimpleNamespace(backward_pass_autocast=[{"device_type": "cuda"}])
    assert option.apply(users) is None  # type: ignore[arg-type]
    assert users.backward_pass_autocast == [{"device_type": "cuda"}], "the user's own value is kept"


def test_every_patch_fits_the_installed_libraries() -> None:
    """Transformer Engine is installed with a GPU only: there tests/gpu trains with its patch."""
    for patch in (*table.PATCHES, *watching.PATCHES):
        if patch.module.startswith("transformer_engine.") and importlib.util.find_spec("transformer_engine") is None:
            continue
        owner = importlib.import_module(patch.module)
        for part in patch.target.split("."):
            owner = getattr(owner, part)
        assert set(patch.needs) <= set(inspect.signature(owner).parameters), patch.target
