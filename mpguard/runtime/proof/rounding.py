"""Values in FP32 that were rounded to BF16 or FP16 on their way: their dtype does not show it, their bits do."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mpguard.policy.dtype import Dtype

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

#: The bits of an FP32 exponent: all are set in an infinity, and in what is not a number.
_EXPONENT = 0x7F800000

#: Largest relative error of a sum in FP32, and smallest one of a sum in FP16, of numbers that do not cancel.
EXACT, COARSE = 2.0**-18, 2.0**-14


def bits_of(samples: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the bits of each sample of FP32 values, as integers of 32 bits.

    Each device is read once: a GPU has to finish its work for each transfer, and few operators run while a step is
    recorded.
    """
    import torch

    found: list[list[int]] = [[]] * len(samples)
    places: defaultdict[torch.device, list[int]] = defaultdict(list)
    for place, values in enumerate(samples):
        places[values.device].append(place)
    for on_device in places.values():
        read = iter(torch.cat([samples[place] for place in on_device]).view(torch.int32).tolist())
        for place in on_device:
            found[place] = list(itertools.islice(read, samples[place].numel()))
    return found


def rounded_to(values: torch.Tensor) -> str | None:
    """Return the 16-bit dtype of which all values (FP32, not zero) are; None if there is none, or too few values."""
    import torch

    return rounded_bits(bits_of([values])[0]) if values.dtype is torch.float32 else None


def rounded_bits(bits: Iterable[int]) -> str | None:
    """Return the 16-bit dtype of which all values (FP32, not zero) are. bits: theirs, see `bits_of`."""
    different = set(bits)
    if len(different) < ENOUGH or any(each & _EXPONENT == _EXPONENT for each in different):  # infinite, or no number
        return None
    for dtype, unused in UNUSED_BITS.items():
        ends_in_zeros = not any(each & ((1 << unused) - 1) for each in different)
        if ends_in_zeros and sum(each >> unused & 1 for each in different) >= LAST_BIT_SHARE * len(different):
            return dtype
    return None


def rounded(bits: Iterable[int], dtype: str) -> list[int]:
    """Return the bits of FP32 values after they were rounded to a 16-bit dtype."""
    import torch

    values = torch.tensor(list(bits), dtype=torch.int32).view(torch.float32)
    return list(values.to(Dtype.parse(dtype).torch).float().view(torch.int32).tolist())


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
