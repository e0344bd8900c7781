"""The config classes of TRL that mpguard knows, against the TRL that is installed: `make test-newest-short`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

from mpguard.lint.facts.program.api_names import TRL_CONFIGS

trl = pytest.importorskip("trl", reason="installed by `make test-newest-short`")


def classes() -> dict[str, type]:
    """The classes that are derived from `TrainingArguments`, by name."""
    from transformers import TrainingArguments

    found: dict[str, type] = {}
    for module in pkgutil.walk_packages(trl.__path__, "trl.", onerror=lambda _: None):
        if module.name.endswith("config"):
            for name, each in vars(importlib.import_module(module.name)).items():
                if inspect.isclass(each) and issubclass(each, TrainingArguments) and each.__module__ == module.name:
                    found[name] = each
    return {name: each for name, each in found.items() if not name.startswith("_")}


def test_their_bf16_is_on_unless_fp16_is(tmp_path: Path) -> None:
    """What explain and MPG863 say of them: no class of TRL is missing, and each has this default."""
    found = classes()
    assert set(found) == TRL_CONFIGS
    for name, each in found.items():
        more = {"teacher_model_server_url": "http://localhost"} if name == "ServerDistillationConfig" else {}
        made = [each(str(tmp_path), use_cpu=True, **more, **given) for given in ({}, {"fp16": True}, {"bf16": False})]
        assert [(one.bf16, one.fp16) for one in made] == [(True, False), (False, True), (False, False)], name
