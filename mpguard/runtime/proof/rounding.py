"""Values in FP32 whose bits look as if they were rounded to BF16 or FP16: a suspicion, which ends no run.

Witnesses are in `witness`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Bits of an FP32 mantissa that are zero in a value of the dtype.
UNUSED_BITS = {"bf16": 16, "fp16": 13}

#: How many different values must be checked. Sums that were not rounded end in that many zeros by chance once in two
#: values; one value that all have, as in the gradients of a constant input, says nothing.
ENOUGH = 24

#: The least share of values whose last bit is set. In the gradients of inputs such as 1 and 0.5 it rarely is, and such
#: gradients are exact in BF16 without any rounding.
LAST_BIT_SHARE = 0.2

#: The bits of an FP32 exponent: all are set in an infinity, and in what is not a number.
_EXPONENT = 0x7F800000


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
