"""The precision keys of Megatron Bridge: YAML overrides of its `ConfigContainer`. From Megatron Bridge 067f987.

Source: `src/megatron/bridge/training/mixed_precision.py` and `training/config.py`. `mixed_precision` is the name of a
recipe or a section with the fields of `MixedPrecisionConfig`; `runtime_config_update` then overwrites the fields of the
same names in `model`, `optimizer` and `ddp`, and logs that at debug level only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpguard.document.values import BOOLEAN, INTEGER, ConfigProblem, ValueKind, one_of, wrong_values
from mpguard.policy.dtype import Dtype

if TYPE_CHECKING:
    from mpguard.document import Document

VERSION = "067f987 (2026-08-22)"
SECTIONS = ("mixed_precision", "model", "optimizer", "ddp")
RECIPES = (
    "bf16_mixed", "fp16_mixed", "bf16_with_fp8_delayed_scaling_mixed", "fp16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_current_scaling_mixed", "fp16_with_fp8_current_scaling_mixed",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed", "nanov2_bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed", "fp16_with_fp8_subchannel_scaling_mixed", "bf16_with_mxfp8_mixed",
    "fp16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed", "nemotron_3_super_bf16_with_nvfp4_mixed",
)  # fmt: skip
#: The fields of `MixedPrecisionConfig`.
FIELDS = frozenset({
    "fp32", "fp16", "bf16", "params_dtype", "pipeline_dtype", "autocast_dtype", "autocast_enabled",
    "grad_reduce_in_fp32", "fp8", "fp8_recipe", "first_last_layers_bf16", "fp8_margin", "fp8_amax_history_len",
    "fp8_amax_compute_algo", "fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_param",
    "fp8_param_gather", "fp4", "fp4_recipe", "fp4_param", "fp4_param_gather", "loss_scale", "initial_loss_scale",
    "min_loss_scale", "loss_scale_window", "hysteresis", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
    "reuse_grad_buf_for_mxfp8_param_ag",
})  # fmt: skip
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
#: The keys whose names speak of precision: those above, and those of Megatron Core's model, optimizer and DDP configs.
KEYS = FIELDS | {
    "mixed_precision", "attention_softmax_in_fp32", "fp32_residual_connection", "fp16_lm_cross_entropy",
    "moe_router_dtype", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
    "use_precision_aware_optimizer", "apply_query_key_layer_scaling", "disable_bf16_reduced_precision_matmul",
    "fp8_param_gather", "tp_only_amax_red", "cuda_graph_scope", "fp8_output_proj", "grad_scale_func",
    "moe_padding_for_fp8", "moe_padding_for_fp4", "autocast_enabled", "enable_autocast", "fp8_quantizer_factory",
}  # fmt: skip


def _is_dtype(value: Any) -> bool:
    name = value.get("_target_") if isinstance(value, Mapping) else value  # as hydra instantiates it
    return Dtype.spelled(str(name)) is not None


_IN_SECTION: Mapping[str, ValueKind] = {
    **dict.fromkeys(
        ("params_dtype", "pipeline_dtype", "autocast_dtype"), ValueKind("the name of a dtype is needed", _is_dtype)
    ),
    **dict.fromkeys(
        ("fp32", "fp16", "bf16", "autocast_enabled", "grad_reduce_in_fp32", "first_last_layers_bf16", "fp8_wgrad",
         "fp8_param", "fp8_param_gather", "fp4_param", "fp4_param_gather"),
        BOOLEAN,
    ),
    **dict.fromkeys(("fp8_margin", "fp8_amax_history_len"), INTEGER),
    "fp8": one_of("e4m3", "hybrid"),
    "fp8_amax_compute_algo": one_of("max", "most_recent"),
}  # fmt: skip
#: Dotted key -> the values that the fields of `MixedPrecisionConfig` have.
VALUES: Mapping[str, ValueKind] = {f"mixed_precision.{key}": kind for key, kind in _IN_SECTION.items()}


def value_refusals(document: Document) -> Iterator[ConfigProblem]:
    """Yield the values that Megatron Bridge or Transformer Engine cannot use, or take for something else."""
    yield from wrong_values(document, VALUES)
