"""Autocast for the grouped matmuls of transformers' experts, which torch's autocast does not cover.

Without it they run in the dtype of their master weights. The module is not in `mpguard.runtime`, whose frames dynamo
skips, because the function is called in the model's forward pass.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def autocast_grouped_mm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' `_grouped_mm` so that both factors are cast to autocast's dtype, as in any other matmul."""
    import torch

    @functools.wraps(original)
    def grouped_mm(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = input.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            input, weight = input.to(dtype), weight.to(dtype)
        return original(input, weight, *args, **kwargs)

    return grouped_mm
