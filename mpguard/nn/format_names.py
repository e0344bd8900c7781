"""The number formats by name: which of them a recipe computes in, and how much noise is too much. Imports no torch."""

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
    "tensorwise_with_bwd_hp": ("tensorwise", "bf16"),
    "blockwise_with_bwd_hp": ("blockwise", "bf16"),
    "mxfp8_with_bwd_hp": ("mxfp8", "bf16"),
    "none": ("bf16", "bf16"),
    "bf16": ("bf16", "bf16"),
}

#: The bound if none is given, in dB: an error of 10 %. On values without outliers a layer has 28.5 dB in FP8, 24.6 dB
#: with gradients in E5M2, and 17.4 dB in NVFP4 (tests/nn/test_layer_error.py). Below 20 dB it has about three times the
#: noise that rounding to FP8 makes where nothing underflows.
BOUND = 20.0

#: The bound for NVFP4, with which few layers have 20 dB: 1.5 times the noise that it has without outliers.
BOUND_NVFP4 = 15.5


def default_bound(recipe: str) -> float:
    """Return the bound for a recipe if none is given."""
    return BOUND_NVFP4 if recipe == "nvfp4" else BOUND
