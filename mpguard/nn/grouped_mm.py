"""The products of transformers' experts, which autocast does not lower: they run in the dtype of their master weights.

Not in `mpguard.runtime`, whose frames dynamo leaves out: this is called in the model's forward pass.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def autocast_grouped_mm(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_grouped_mm` of transformers with both factors in autocast's dtype, as in each other product."""
    import torch

    @functools.wraps(original)
    def grouped_mm(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = input.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            input, weight = input.to(dtype), weight.to(dtype)
        return original(input, weight, *args, **kwargs)

    return grouped_mm
