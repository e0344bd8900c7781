"""torchao: `Float8LinearConfig`, and the filter of the Linear layers to which it applies.

    convert_to_float8_training(model, config=policy.to("torchao"), module_filter_fn=...)

With `fp8_modules` there is a config for each recipe, with the filter of its layers:

    for config, of_recipe in policy.to("torchao"):
        convert_to_float8_training(model, config=config, module_filter_fn=of_recipe)

`Float8LinearConfig` has current scaling only: tensorwise, rowwise, rowwise_with_gw_hp. torchao's MXFP8 has a config of
its own, which drops the bias of every layer: `mpguard.convert` takes its layer in place of it, as for block scaling.
"""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from mpguard import PolicyError
from mpguard.policy import FLOAT8_LINEAR, NONE, ModuleRecipe, Policy, entry_for
from mpguard.targets import Settings, plugin

if TYPE_CHECKING:
    import torch
    from torchao.float8 import Float8LinearConfig


@plugin(
    "torchao",
    carries=(
        "fp8",
        "fp8_recipe",
        "backend",
        "fp8_param",
        "fp8_param_gather",
        "fp8_fast_accum",
        "fp8_emulate",
        "fp8_modules",
    ),
    extra="torchao",
    library="torchao",
)
def torchao(policy: Policy, strategy: str | None) -> Settings:
    """`torchao.float8.Float8LinearConfig`; with `fp8_modules` a list of pairs of one and the filter of its layers.

    `fp8_param_gather` becomes `enable_fsdp_float8_all_gather` only under strategy fsdp2: elsewhere the weights that it
    wraps never train and cannot be saved.
    """
    if not policy.fp8:
        what = "FP4" if policy.fp4 else "no FP8"
        raise PolicyError(
            f"torchao: the policy `{policy.name}` has {what}; this target is only for FP8. Set fp8 and fp8_recipe"
        )
    if "torchao" not in policy.backends:
        raise PolicyError(
            f"torchao: fp8_recipe is {policy.fp8_recipe} and backend is {policy.backend}; "
            "torchao runs tensorwise, rowwise, rowwise_with_gw_hp, mxfp8 and blockwise, with backend torchao or auto. "
            "Use target `te`"
        )
    tensorwise = policy.fp8_recipe == "tensorwise"
    if not tensorwise and policy.fp8 != "e4m3":
        raise PolicyError(
            f'torchao: fp8 is {policy.fp8}; its {policy.fp8_recipe} recipe is E4M3 in both directions. Set fp8="e4m3"'
        )
    gather = policy.fp8_param_gather and tensorwise and strategy == "fsdp2" and not policy.fp8_modules
    settings: dict[str, Any] = {
        "recipe": policy.fp8_recipe,
        "grad_output": "e5m2" if policy.fp8 == "hybrid" else "e4m3",
        "enable_fsdp_float8_all_gather": bool(gather),
        "fast_accumulation_in_gradients": policy.fp8_fast_accum,
        "emulate": policy.fp8_emulate,
    }
    if policy.fp8_modules:
        entries = [each.plain() for each in policy.fp8_modules]
        settings["modules"] = {"entries": entries, "exclude": list(policy.kept_out_of_fp8)}
    return settings


def float8_linear_config(arguments: dict[str, Any], **more: Any) -> Float8LinearConfig:
    """Return a `Float8LinearConfig`. more: additional fields of it."""
    from torchao.float8 import CastConfig, Float8LinearConfig
    from torchao.float8.config import Float8GemmConfig, e4m3_dtype

    if arguments["recipe"] == "mxfp8":
        raise PolicyError(
            "torchao: `Float8LinearConfig` has no mxfp8, and torchao's `MXFP8TrainingOpConfig` drops the bias of every "
            "Linear. Use `mpguard.convert(model, policy)`, which takes torchao's MXFP8Linear"
        )
    if arguments["recipe"] not in FLOAT8_LINEAR:
        raise PolicyError(
            f"torchao: `Float8LinearConfig` has no {arguments['recipe']}. Use `mpguard.convert(model, policy)`, which "
            "takes torchao's layer for it"
        )
    config = Float8LinearConfig.from_recipe_name(arguments["recipe"])
    changes: dict[str, Any] = {
        "enable_fsdp_float8_all_gather": arguments["enable_fsdp_float8_all_gather"],
        "emulate": arguments["emulate"],
        **more,
    }
    if arguments["recipe"] == "tensorwise" and arguments["grad_output"] == "e4m3":
        cast = CastConfig(target_dtype=e4m3_dtype)
        changes |= {"cast_config_grad_output": cast, "cast_config_grad_output_for_grad_weight": cast}
    if arguments["fast_accumulation_in_gradients"]:
        fast = Float8GemmConfig(use_fast_accum=True)
        changes |= {"gemm_config_grad_input": fast, "gemm_config_grad_weight": fast}
    return dataclasses.replace(config, **changes)


@torchao.builder
def configs(arguments: dict[str, Any]) -> Float8LinearConfig | list[tuple[Float8LinearConfig, Float8Filter]]:
    """Return a config; with `fp8_modules` one for each recipe, with the filter of its layers."""
    if "modules" not in arguments:
        return float8_linear_config(arguments)
    entries = tuple(ModuleRecipe(**each) for each in arguments["modules"]["entries"])
    exclude, base = tuple(arguments["modules"]["exclude"]), arguments["recipe"]
    recipes = dict.fromkeys([base, *(each.recipe for each in entries if each.recipe != NONE)])
    return [
        (float8_linear_config({**arguments, "recipe": each}), Float8Filter(exclude, entries, each, base))
        for each in recipes
    ]


@dataclasses.dataclass(frozen=True)
class Float8Filter:
    """The filter of modules that become FP8: Linear layers with sizes that FP8 matmuls support, not excluded by name.

    Callable as torchao's `module_filter_fn` and accelerate's `module_filter_func`.
    exclude: `fnmatch` patterns on the qualified name. recipe: only the layers to which `modules` gives this recipe, or
    `base` where no pattern matches; None for all.
    """

    exclude: tuple[str, ...]
    modules: tuple[ModuleRecipe, ...] = ()
    recipe: str | None = None
    base: str | None = None

    #: torch._scaled_mm requires multiples of 16.
    MULTIPLE = 16

    @classmethod
    def of(cls, policy: Policy) -> Float8Filter:
        """Return the filter of a policy."""
        return cls(policy.kept_out_of_fp8)

    def __call__(self, module: torch.nn.Module, name: str) -> bool:
        from torch import nn

        return (
            isinstance(module, nn.Linear)
            and module.in_features % self.MULTIPLE == 0
            and module.out_features % self.MULTIPLE == 0
            and not any(fnmatch(name, pattern) for pattern in self.exclude)
            and (self.recipe is None or self.recipe == self._recipe_of(name))
        )

    def _recipe_of(self, name: str) -> str | None:
        entry = entry_for([name], self.modules)
        return self.base if entry is None else entry.recipe
