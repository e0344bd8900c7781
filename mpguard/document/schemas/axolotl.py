"""The precision keys of an axolotl YAML, their values, and queries that rules need. From axolotl 0.19.0.

Source: its `utils/schemas/config.py`, `fp8.py`, `validation.py` and `utils/config/__init__.py`. axolotl cannot be
installed together with the other libraries of the tests; `bf16` is tested on the type that its schema declares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpguard.document import Document, Entry

VERSION = "0.19.0"
#: The text that `bf16: Literal["auto"] | bool | None` accepts: `auto`, and what pydantic converts to a boolean.
BF16_WORDS = frozenset({"auto", "true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0"})
#: Activation checkpointing in `fsdp_config`, under either name.
CHECKPOINTING = ("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing")
#: The values of `fp8_config.recipe`; the first is the default, and the only one with a float8 all-gather.
FP8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
#: The keys of `fp8_config`, in which others are refused (`extra="forbid"`).
FP8_KEYS = frozenset({"recipe"})
#: The classes that `fp32_norms` keeps in FP32 without `fp32_norm_classes`.
FP32_NORM_CLASSES = ("RMSNorm", "LayerNorm")
#: The top-level keys whose names speak of precision, with those of its integrations (`integrations/*/args.py`).
KEYS = frozenset({
    "bf16", "fp16", "fp8", "fp8_config", "fp8_enable_fsdp_float8_all_gather", "bfloat16", "float16", "float32", "tf32",
    "fp32_norms", "fp32_norm_classes", "embeddings_skip_upcast", "peft_autocast_adapter_dtype", "torch_dtype",
    "torch_compile", "mixed_precision_policy", "dsv4_bf16_all", "dsv4_fp4_grouped_mode", "dsv4_fp8_lora_kernel",
    "dsv4_fp8_nonexpert_mode", "gemma4_fp8_nonexpert", "nvfp4_merge_aware", "nvfp4_merge_aware_start_step",
})  # fmt: skip


def is_on(document: Document, key: str) -> Entry | None:
    """Return the entry of a switch that is on; None if it is off or absent."""
    entry = document.entry(key)
    return entry if entry is not None and entry.value is True else None


def fsdp_version(document: Document) -> Entry | None:
    """Return the entry of the FSDP version, at the top level or in `fsdp_config`; None if absent."""
    keys = ("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version")
    return next((entry for key in keys if (entry := document.entry(key)) is not None), None)


def is_fsdp2(document: Document) -> bool:
    """True if the file selects version 2 of FSDP."""
    entry = fsdp_version(document)
    return entry is not None and str(entry.value) == "2"
