"""Values in FP32 that were rounded to BF16 or FP16 on their way: their dtype does not show it, their bits do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Bits of an FP32 mantissa that are zero in a value of the dtype.
UNUSED_BITS = {"bf16": 16, "fp16": 13}

#: How many different values must be looked at. Sums that were not rounded end in that many zeros by chance once in two
#: values; one value that all have, as in the gradients of a constant input, says nothing.
ENOUGH = 24

#: The least share of values whose last bit is set. In the gradients of inputs such as 1 and 0.5 it rarely is, and such
#: gradients are exact in BF16 without any rounding.
LAST_BIT_SHARE = 0.2

#: Largest relative error of a sum in FP32, and smallest one of a sum in FP16, of numbers that do not cancel.
EXACT, COARSE = 2.0**-18, 2.0**-14


def rounded_to(values: torch.Tensor) -> str | None:
    """Return the 16-bit dtype of which all values (FP32, not zero) are; None if there is none, or too few values."""
    import torch

    values = values.unique()  # type: ignore[no-untyped-call]
    if values.dtype is not torch.float32 or values.numel() < ENOUGH or not bool(torch.isfinite(values).all()):
        return None
    bits = values.contiguous().view(torch.int32)
    for dtype, unused in UNUSED_BITS.items():
        ends_in_zeros = not bool((bits & ((1 << unused) - 1)).any())
        if ends_in_zeros and float(((bits >> unused) & 1).float().mean()) >= LAST_BIT_SHARE:
            return dtype
    return None


def summed_in(found: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, terms: int) -> str | None:
    """Return the 16-bit dtype in which a sum was computed, up to a factor; None if it was not, or is another sum.

    found: values of the sum. exact: the same in FP64. magnitude: the sum of absolute values, which bounds errors.
    """
    factor = float((found.double() * exact).sum() / (exact * exact).sum().clamp_min(1e-300))
    if factor == 0.0 or not math.isfinite(factor) or found.numel() < ENOUGH:
        return None  # infinite: a pass of the sum has overflowed, and its gradients were thrown away
    error = (found.double() - factor * exact).abs() / (abs(factor) * magnitude).clamp_min(1e-300)
    typical = float(error.square().mean().sqrt())
    if typical < COARSE or float(error.max()) > terms * 2.0**-8:
        return None
    return "bf16" if typical > 2.0**-11 else "fp16"
