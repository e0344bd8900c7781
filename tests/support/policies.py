"""Policies of every kind for tests: recipes, and every valid change of one field."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import mpguard
from mpguard.core.errors import NoEffectWarning, PolicyError
from mpguard.policy.fp8_modules import ModuleRecipe
from mpguard.policy.policy import Policy

#: For each field, values to try. `variations` skips a value that conflicts with the other fields of a policy.
CANDIDATES: dict[str, tuple[Any, ...]] = {
    "bf16": (True, False),
    "fp16": (True, False),
    "params_dtype": ("fp32", "bf16", "fp16"),
    "pipeline_dtype": ("fp32", "bf16", "fp16"),
    "autocast_enabled": (True, False),
    "autocast_dtype": ("bf16", "fp16", None),
    "master_dtype": ("fp32", "bf16"),
    "master_weights": ("model", "optimizer"),
    "grad_reduce_in_fp32": (True, False),
    "buffer_dtype": ("fp32", "bf16", None),
    "output_dtype": ("fp32", "bf16", None),
    "tf32": (True, False, None),
    "fp32_modules": ((), ("*norm*",)),
    "fp8": ("hybrid", "e4m3", None),
    "fp8_recipe": ("delayed", "tensorwise", "blockwise", "mxfp8", "rowwise", "rowwise_with_gw_hp"),
    "backend": ("te", "torchao", "auto"),
    "fp8_margin": (0, 3),
    "fp8_amax_history_len": (1, 16, 1024),
    "fp8_amax_compute_algo": ("max", "most_recent"),
    "reduce_amax": (True, False),
    "fp8_wgrad": (True, False),
    "fp8_dot_product_attention": (True, False),
    "fp8_multi_head_attention": (True, False),
    "fp8_param": (True, False, "auto"),
    "fp8_param_gather": (True, False, "auto"),
    "fp8_required": (True, False),
    "fp8_exclude": ((), ("*lm_head", "*mlp*")),
    "fp8_modules": ((), (ModuleRecipe("*mlp*", "none"),), (ModuleRecipe("*mlp*", "tensorwise"),)),
    "fp8_head": (True, False),
    "fp8_experts": (True, False),
    "fp8_fast_accum": (True, False),
    "fp8_calibration": (True, False),
    "fp8_weight_cache": (True, False),
    "fp8_emulate": (True, False),
    "first_last_layers_bf16": (True, False),
    "num_layers_at_start_in_bf16": (0, 1, 5),
    "num_layers_at_end_in_bf16": (0, 1, 5),
    "fp4": ("e2m1", None),
    "fp4_recipe": ("nvfp4",),
    "fp4_param": (True, False, "auto"),
    "fp4_param_gather": (True, False, "auto"),
    "reuse_grad_buf_for_mxfp8_param_ag": (True, False),
    "loss_scale": (128.0, None),
    "initial_loss_scale": (2.0**16, 2.0**32),
    "min_loss_scale": (1.0, 16.0),
    "loss_scale_window": (200, 1000),
    "hysteresis": (2, 5),
    "compile": (True, False, "auto"),
    "compile_mode": ("reduce-overhead", "default"),
    "fuse": (True, False),
    "attention_fix": (True, False),
}


@functools.cache
def bases() -> tuple[Policy, ...]:
    """Policies of every kind: all installed recipes, and a few that no recipe has."""
    more = [
        Policy(bf16=True, params_dtype="fp32"),
        Policy(fp16=True, params_dtype="fp32"),
        Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True),
        Policy(bf16=True, fp8="hybrid", backend="te"),
        Policy(bf16=True, fp8="hybrid", fp8_recipe="mxfp8"),
        Policy(bf16=True, fp8="e4m3", fp8_recipe="delayed", fp8_amax_compute_algo="max"),
    ]
    return (*map(mpguard.recipe, mpguard.recipes()), *more)


#: Fields that need others: the fields that are changed together with them.
TOGETHER: dict[tuple[str, Any], dict[str, Any]] = {
    ("first_last_layers_bf16", False): {"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0},
    ("first_last_layers_bf16", True): {"num_layers_at_start_in_bf16": 1},
}


@functools.cache
def variations(policy: Policy, field: str) -> tuple[Policy, ...]:
    """Return the valid policies that differ from one in a field (and in fields that depend on it)."""
    return tuple(_variations(policy, field))


def _variations(policy: Policy, field: str) -> Iterator[Policy]:
    for value in CANDIDATES[field]:
        try:
            changed = policy.replace(**{field: value}, **TOGETHER.get((field, value), {}))
        except (PolicyError, NoEffectWarning):
            continue
        if changed != policy:
            yield changed
