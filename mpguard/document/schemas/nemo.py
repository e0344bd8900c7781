"""The precision keys of a NeMo 1.x YAML. From NeMo 1.23.

Source: `examples/nlp/language_modeling/conf/megatron_gpt_config.yaml`. The keys are in `trainer` and `model`. All FP8
keys are ignored unless `model.transformer_engine` is true (`megatron_gpt_model.py`).
"""

from __future__ import annotations

VERSION = "1.23"
#: The sections that hold precision keys.
SECTIONS = ("trainer", "model")
FP8 = (
    "fp8", "fp8_e4m3", "fp8_hybrid", "fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo",
    "reduce_amax", "fp8_params",
)  # fmt: skip
#: The keys whose names speak of precision.
KEYS = frozenset({
    *FP8, "fp8_wgrad",
    "precision", "megatron_amp_O2", "transformer_engine", "native_amp_init_scale", "native_amp_growth_interval",
    "hysteresis", "fp32_residual_connection", "fp16_lm_cross_entropy", "attention_softmax_in_fp32",
    "params_dtype", "pipeline_dtype", "autocast_dtype", "optimizer_dtype", "grad_sync_dtype", "param_sync_dtype",
    "bf16", "fp16", "enable_autocast", "fp8_dot_product_attention", "fp8_multi_head_attention",
})  # fmt: skip
