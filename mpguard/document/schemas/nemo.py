"""The precision keys of a NeMo 1.x YAML. From NeMo 1.23.

Source: `examples/nlp/language_modeling/conf/megatron_gpt_config.yaml`. The keys are in `trainer` and `model`. All FP8
keys are ignored unless `model.transformer_engine` is true (`megatron_gpt_model.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mpguard.document.values import BOOLEAN, INTEGER, ConfigProblem, ValueKind, one_of, wrong_values

if TYPE_CHECKING:
    from mpguard.document import Document

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
#: The switches of the formats; the first one wins.
FORMATS = ("fp8_e4m3", "fp8_hybrid")
#: Dotted key -> the values that NeMo and Lightning have.
VALUES: Mapping[str, ValueKind] = {
    "trainer.precision": one_of(
        "bf16", "16", "32", "64", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "32-true", "64-true",
        "transformer-engine", "transformer-engine-float16", also=(16, 32, 64),
    ),
    **dict.fromkeys(
        (f"model.{key}" for key in ("fp8", "transformer_engine", "megatron_amp_O2", "reduce_amax", *FORMATS)), BOOLEAN
    ),
    **dict.fromkeys((f"model.{key}" for key in ("fp8_margin", "fp8_interval", "fp8_amax_history_len")), INTEGER),
    "model.fp8_amax_compute_algo": one_of("max", "most_recent"),
}  # fmt: skip


def value_refusals(document: Document) -> Iterator[ConfigProblem]:
    """Yield the values that NeMo or Lightning cannot parse, or take for something else."""
    yield from wrong_values(document, VALUES)


def refusals(document: Document) -> Iterator[ConfigProblem]:
    """Yield the keys with values that cannot be, and FP8 that NeMo ignores."""
    yield from value_refusals(document)
    fp8, engine = document.entry("model.fp8"), document.entry("model.transformer_engine")
    if fp8 is not None and fp8.value is True and (engine is None or engine.value in (None, False)):
        yield ConfigProblem("model.fp8", "NeMo ignores FP8 without `transformer_engine: true`; set it")
