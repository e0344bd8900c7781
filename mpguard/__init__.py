"""mpguard: declare mixed precision once, enforce it everywhere, prove it.

    import mpguard

    policy = mpguard.recipe("bf16_mixed")
    fully_shard(model, mp_policy=policy.to("fsdp2"))
    config, changes = mpguard.inject(config, policy, "deepspeed")
    mpguard.activate(policy)  # applies to everything that is built from here on
    mpguard.convert(model, "hopper_bf16_with_fp8_mixed")  # FP8 layers in your own model
    mpguard.watch(jsonl="run.jsonl")  # NaN, skipped steps, underflow, divergence
    mpguard.sensitivity(model, batches, policy)  # which layer loses how much in which format

Importing mpguard does not import torch.
"""

# ruff: noqa: E402 - sys.path is changed before the other imports, which it affects

from __future__ import annotations

import importlib
import sys


def _is_command() -> bool:
    """True if Python was started as `python -m mpguard`, or as a run of `mpguard tune`, and imports this package."""
    if sys.argv[:1] != ["-m"]:
        return False
    arguments = iter(sys.orig_argv[1:])
    for each in arguments:
        letters = each[1:] if each[:1] == "-" != each[1:2] else ""
        option = next((index for index, letter in enumerate(letters) if letter in "cmWX"), None)  # with an argument
        if option is not None:
            value = letters[option + 1 :] or next(arguments, "")  # `-mmpguard`, `-m mpguard`
            if letters[option] == "m":
                return value in ("mpguard", "mpguard.tune.start")
    return False


if _is_command() and not getattr(sys.flags, "safe_path", False):
    # `python -m` puts the current folder first in sys.path: a `torch.py` or `yaml.py` in it, and rules that an
    # `*.egg-info` in it names, would be executed. Code that is linted must not be imported.
    del sys.path[0]

from typing import TYPE_CHECKING

from mpguard.core.version import __version__

if TYPE_CHECKING:
    from mpguard.core.errors import (
        ConfigError,
        ExtensionError,
        MissingExtra,
        MpguardError,
        MpguardWarning,
        NoEffect,
        NoEffectWarning,
        NotCarried,
        NotInForce,
        NotProven,
        PolicyError,
        SettingsError,
        UnknownRecipe,
    )
    from mpguard.nn.fp8.amax_history import fp8_state_dict, load_fp8_state_dict
    from mpguard.nn.fp8.convert import convert, revert
    from mpguard.nn.fp8.report import Conversion
    from mpguard.numerics.api import sensitivity
    from mpguard.numerics.report import Sensitivity
    from mpguard.policy.dtype import Dtype
    from mpguard.policy.policy import Policy
    from mpguard.policy.recipes import recipe, recipes, register
    from mpguard.runtime.activation import activate
    from mpguard.runtime.guard import prove
    from mpguard.runtime.proof.report import Proof
    from mpguard.targets.inject import Change, inject
    from mpguard.watching.api import watch


__all__ = [
    "Change",
    "ConfigError",
    "Conversion",
    "Dtype",
    "ExtensionError",
    "MissingExtra",
    "MpguardError",
    "MpguardWarning",
    "NoEffect",
    "NoEffectWarning",
    "NotCarried",
    "NotInForce",
    "NotProven",
    "Policy",
    "PolicyError",
    "Proof",
    "Sensitivity",
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
    "sensitivity",
    "watch",
]


#: Module -> its names. Each module is imported when one of them is first used: some import torch, and the linter needs
#: none of them.
_LAZY = {
    "mpguard.core.errors": (
        "ConfigError", "ExtensionError", "MissingExtra", "MpguardError", "MpguardWarning", "NoEffect",
        "NoEffectWarning", "NotCarried", "NotInForce", "NotProven", "PolicyError", "SettingsError", "UnknownRecipe",
    ),
    "mpguard.nn.fp8.amax_history": ("fp8_state_dict", "load_fp8_state_dict"),
    "mpguard.nn.fp8.convert": ("convert", "revert"),
    "mpguard.nn.fp8.report": ("Conversion",),
    "mpguard.numerics.api": ("sensitivity",),
    "mpguard.numerics.report": ("Sensitivity",),
    "mpguard.policy.dtype": ("Dtype",),
    "mpguard.policy.policy": ("Policy",),
    "mpguard.policy.recipes": ("recipe", "recipes", "register"),
    "mpguard.runtime.activation": ("activate",),
    "mpguard.runtime.guard": ("prove",),
    "mpguard.runtime.proof.report": ("Proof",),
    "mpguard.targets.inject": ("Change", "inject"),
    "mpguard.watching.api": ("watch",),
}  # fmt: skip
_PACKAGES = ("core", "policy", "targets")


def __getattr__(name: str) -> object:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    if name in _PACKAGES:
        return importlib.import_module(f"mpguard.{name}")
    raise AttributeError(f"module 'mpguard' has no attribute {name!r}")
