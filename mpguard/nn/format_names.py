"""The number formats by name: what they are called, and which of them a recipe of the policy computes in. No torch."""

from __future__ import annotations

from collections.abc import Mapping

#: The formats of `number_formats`, and what they are called.
LABELS: Mapping[str, str] = {
    "bf16": "BF16",
    "tensorwise": "FP8 tensorwise",
    "rowwise": "FP8 rowwise",
    "blockwise": "FP8 blockwise",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
}

#: The formats of output and weight gradient under a recipe of the policy, and for each format by itself.
FORMAT_OF: Mapping[str, tuple[str, str]] = {
    "delayed": ("tensorwise", "tensorwise"),
    "tensorwise": ("tensorwise", "tensorwise"),
    "rowwise": ("rowwise", "rowwise"),
    "rowwise_with_gw_hp": ("rowwise", "bf16"),
    "blockwise": ("blockwise", "blockwise"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "none": ("bf16", "bf16"),
    "bf16": ("bf16", "bf16"),
}
