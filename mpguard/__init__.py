"""mpguard: mixed precision said once, in force everywhere, and proven.

    import mpguard

    policy = mpguard.recipe("bf16_mixed")
    fully_shard(model, mp_policy=policy.to("fsdp2"))
    config, changes = mpguard.inject(config, policy, "deepspeed")
    mpguard.activate(policy)  # everything that is built from here on
    mpguard.convert(model, "hopper_bf16_with_fp8_mixed")  # FP8 layers in a model of one's own

Importing mpguard imports no torch.
"""

# ruff: noqa: E402 - what is imported first decides where the rest comes from

from __future__ import annotations

import importlib
import sys


def _is_command() -> bool:
    """Whether Python was started as `python -m mpguard`, and imports this to get there."""
    if sys.argv[:1] != ["-m"]:
        return False
    arguments = iter(sys.orig_argv[1:])
    for each in arguments:
        letters = each[1:] if each[:1] == "-" != each[1:2] else ""
        takes = next((place for place, letter in enumerate(letters) if letter in "cmWX"), None)
        if takes is not None:
            value = letters[takes + 1 :] or next(arguments, "")  # `-mmpguard`, `-m mpguard`
            if letters[takes] == "m":
                return value == "mpguard"
    return False


if _is_command() and not getattr(sys.flags, "safe_path", False):
    # It puts the current folder first: its `torch.py` or `yaml.py`, and rules that an `*.egg-info` there names, would
    # be run. What is linted is not imported.
    del sys.path[0]

from typing import TYPE_CHECKING

from mpguard.core.errors import (
    ConfigError,
    ExtensionError,
    MissingExtra,
    MpguardError,
    MpguardWarning,
    NotCarried,
    NotInForce,
    NotProven,
    PolicyError,
    SettingsError,
    UnknownRecipe,
)
from mpguard.core.version import __version__
from mpguard.policy.dtype import Dtype
from mpguard.policy.policy import Policy
from mpguard.policy.recipes import recipe, recipes, register
from mpguard.targets.inject import Change, inject

if TYPE_CHECKING:
    from mpguard.nn.fp8.amax_history import fp8_state_dict, load_fp8_state_dict
    from mpguard.nn.fp8.convert import convert, revert
    from mpguard.runtime.activation import activate
    from mpguard.runtime.guard import prove


__all__ = [
    "Change",
    "ConfigError",
    "Dtype",
    "ExtensionError",
    "MissingExtra",
    "MpguardError",
    "MpguardWarning",
    "NotCarried",
    "NotInForce",
    "NotProven",
    "Policy",
    "PolicyError",
    "SettingsError",
    "UnknownRecipe",
    "__version__",
    "activate",
    "convert",
    "fp8_state_dict",
    "inject",
    "load_fp8_state_dict",
    "prove",
    "recipe",
    "recipes",
    "register",
    "revert",
]


#: Names that are imported from these modules when they are first used, because the modules take time to import.
_LAZY = {
    "activate": "mpguard.runtime.activation",
    "convert": "mpguard.nn.fp8.convert",
    "fp8_state_dict": "mpguard.nn.fp8.amax_history",
    "load_fp8_state_dict": "mpguard.nn.fp8.amax_history",
    "prove": "mpguard.runtime.guard",
    "revert": "mpguard.nn.fp8.convert",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mpguard' has no attribute {name!r}")
