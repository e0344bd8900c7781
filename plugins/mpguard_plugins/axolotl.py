"""axolotl: the precision options of its YAML.

Written for axolotl 0.19.0, `utils/schemas/config.py`, `fp8.py`, `validation.py` and `utils/config/__init__.py`.
axolotl loads the model in BF16 for `bf16` as well as for `bfloat16`; FP32 master weights exist only where accelerate's
FSDP creates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpguard import PolicyError
from mpguard.policy import Dtype, Policy
from mpguard.targets import ABSENT, Setting, Settings, lookup, plugin


@plugin(
    "axolotl",
    carries=(
        "bf16",
        "fp16",
        "master_dtype",
        "tf32",
        "fp8",
        "fp8_recipe",
        "backend",
        "fp8_param",
        "fp8_param_gather",
        "fp32_modules",
        "compile",
    ),
)
def axolotl(policy: Policy, strategy: str | None) -> Settings:
    """axolotl's YAML. Its FP8 recipes are torchao's.

    `bf16: auto`, its default, means FP16 on a GPU without BF16, so it is always resolved.
    """
    if policy.fp8:
        _check_fp8(policy)
    full = policy.master_dtype is Dtype.BF16
    gathered = policy.fp8_param_gather and policy.fp8_recipe == "tensorwise" and strategy == "fsdp2"
    settings: dict[str, Any] = {
        "bf16": Setting(
            policy.bf16 and not full,
            "bfloat16 trains without FP32 weights" if full else "on every GPU; auto is decided by the GPU",
        ),
        "fp16": _switch(policy.fp16),
        "bfloat16": _switch(full),
        "float16": _switch(False),
        "fp8": _switch(policy.fp8 is not None),
        "fp8_enable_fsdp_float8_all_gather": _switch(bool(policy.fp8 and gathered), _not_gathered(policy, strategy)),
    }
    if policy.fp8:
        settings["fp8_config.recipe"] = Setting(policy.fp8_recipe, default=_DEFAULT_RECIPE)
    else:
        settings["fp8_config"] = Setting(ABSENT, "axolotl refuses it without fp8", equivalent=lambda found: not found)
    if policy.fp32_modules:
        settings["fp32_norms"] = _norms(policy, strategy)
    if policy.tf32 is not None:
        settings["tf32"] = policy.tf32
    if policy.fp8 and policy.compile is not False:
        reason = "without it FP8 is slower than BF16"
        settings["torch_compile"] = Setting(True, reason, equivalent=lambda found: found in (True, "auto"))
    elif policy.compile != "auto":
        settings["torch_compile"] = policy.compile
    return settings


#: The recipe of torchao that `fp8: true` alone means.
_DEFAULT_RECIPE = "tensorwise"
#: Recipe -> its format.
_FORMATS = {"tensorwise": "hybrid", "rowwise": "e4m3", "rowwise_with_gw_hp": "e4m3"}
#: The name pattern of `fp32_norms`.
_NORMS = ("*norm*",)


def _check_fp8(policy: Policy) -> None:
    """Raise `PolicyError` for FP8 that axolotl does not support."""
    if policy.fp16:
        raise PolicyError(
            "axolotl: the policy has fp8 with fp16; axolotl's fp8 computes the rest in bf16. Set bf16=True"
        )
    if _FORMATS.get(policy.fp8_recipe) != policy.fp8 or "torchao" not in policy.backends:
        raise PolicyError(
            f"axolotl: fp8 is {policy.fp8} with fp8_recipe {policy.fp8_recipe} on {' or '.join(policy.backends)}; "
            "axolotl has torchao's tensorwise (hybrid), rowwise and rowwise_with_gw_hp (e4m3). Use the recipe "
            "hopper_bf16_with_fp8_mixed or bf16_with_fp8_rowwise_mixed"
        )


def _norms(policy: Policy, strategy: str | None) -> Setting:
    """Return the setting of norms in FP32. Raises `PolicyError` for other modules, and without FSDP2."""
    if policy.fp32_modules != _NORMS:
        raise PolicyError(
            f"axolotl: fp32_modules is {list(policy.fp32_modules)}; axolotl keeps norms in FP32 (`fp32_norms`), and no "
            f"other modules. Set it to {list(_NORMS)}"
        )
    if strategy not in (None, "fsdp2"):
        raise PolicyError(f"axolotl: fp32_modules under {strategy}; `fp32_norms` requires FSDP2 (fsdp_version: 2)")
    return Setting(True)


def _not_gathered(policy: Policy, strategy: str | None) -> str:
    """Return why the all-gather is off."""
    if policy.fp8 and policy.fp8_recipe == "tensorwise" and strategy == "fsdp2":
        return "the policy gathers in the compute dtype; --override fp8_param_gather=true keeps it"
    return "only FP8 with tensorwise scales under FSDP2 has it"


def _switch(on: bool, reason: str = "") -> Setting:
    """Return the setting of a switch that is off by default, where null and false are equivalent."""
    return Setting(True) if on else Setting(ABSENT, reason, equivalent=lambda found: not found)


@axolotl.detector
def is_config(config: Mapping[str, Any]) -> bool:
    """True for a config with `base_model` and another key of axolotl."""
    own = ("datasets", "micro_batch_size", "sequence_len", "adapter", "num_epochs", "special_tokens", "val_set_size")
    return "base_model" in config and any(key in config for key in own)


@axolotl.strategy_reader
def strategy_of(config: Mapping[str, Any]) -> str | None:
    """Return the version of FSDP that the config selects; None without FSDP."""
    if not (config.get("fsdp") or config.get("fsdp_config")):
        return None
    versions = (lookup(config, key) for key in ("fsdp_version", "fsdp_config.fsdp_version"))
    return "fsdp2" if any(str(version) == "2" for version in versions) else "fsdp1"


@axolotl.adapter
def adapt(settings: dict[str, Setting], config: Mapping[str, Any]) -> dict[str, Setting]:
    """Leave out the recipe where the config has no `fp8_config`: its default is the required one."""
    recipe = settings.get("fp8_config.recipe")
    if recipe is not None and recipe.implied(lookup(config, "fp8_config.recipe")):
        return {key: setting for key, setting in settings.items() if key != "fp8_config.recipe"}
    return settings


@axolotl.reader
def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy fields of an axolotl YAML.

    `bf16: full`, which axolotl's documentation has and its schema refuses, is read as `bfloat16: true`.
    """
    found: dict[str, Any] = {}
    bf16 = config.get("bf16", "auto")
    if config.get("bfloat16") is True or bf16 == "full":
        found |= {"bf16": True, "master_dtype": "bf16"}
    elif bf16 is True or (bf16 == "auto" and not config.get("fp16")):
        found["bf16"] = True
    elif config.get("fp16") is True or config.get("float16") is True:
        found["fp16"] = True
    if config.get("fp8") is True:
        gather = config.get("fp8_enable_fsdp_float8_all_gather") is True
        named = lookup(config, "fp8_config.recipe")
        recipe = _DEFAULT_RECIPE if named in (ABSENT, None) else str(named)
        if recipe not in _FORMATS:
            raise PolicyError(f"axolotl: fp8_config.recipe is {recipe}; it is one of {', '.join(_FORMATS)}")
        found |= {"fp8": _FORMATS[recipe], "fp8_recipe": recipe, "fp8_param_gather": gather}
    if config.get("fp32_norms") is True:
        found["fp32_modules"] = list(_NORMS)
    if isinstance(config.get("tf32"), bool):
        found["tf32"] = config["tf32"]
    if isinstance(config.get("torch_compile"), bool):
        found["compile"] = config["torch_compile"]
    return found
