"""Values in FP32 that were rounded to BF16 or FP16 on their way: their dtype does not show it, their bits do."""

from __future__ import annotations

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


def summed_in(found: torch.Tensor, parts: torch.Tensor, terms: int) -> str | None:
    """Return the 16-bit dtype in which a sum was computed, each part up to a factor; None if it was not, or is another.

    Scripts weigh the gradients of tasks, project one on another, and throw away those of a first pass: that is no
    rounding. found: values of the sum. parts: what was summed, in FP64, a row for each. terms: how many they are of.
    """
    import torch

    if found.numel() < ENOUGH or not bool(torch.isfinite(parts).all()):
        return None  # a pass of the sum has overflowed, and its gradients were thrown away
    values, parts = found.double().cpu(), parts.cpu()
    factors = torch.linalg.lstsq(parts.T, values[:, None], driver="gelsd").solution  # parts may be alike
    magnitude = (factors * parts).abs().sum(0)
    if not bool(magnitude.any()):
        return None
    error = (values - (factors * parts).sum(0)).abs() / magnitude.clamp_min(1e-300)
    typical = float(error.square().mean().sqrt())
    if typical < COARSE or not float(error.max()) <= terms * 2.0**-8:
        return None
    return "bf16" if typical > 2.0**-11 else "fp16"
