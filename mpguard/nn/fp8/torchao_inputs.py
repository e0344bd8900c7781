"""The inputs of torchao's FP8 layers."""

from __future__ import annotations

from typing import Any

import torch

from mpguard.core.errors import NotInForce


def prepared(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """Return the input of a layer in autocast's dtype: torchao itself reads only the state of CUDA's autocast.

    Raises `NotInForce` for one on the CPU.
    """
    device = input.device.type
    if device == "cpu" and not layer.config.emulate:
        _refuse_cpu(layer)
    return input.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else input


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_cpu(layer: Any) -> None:
    """Raise `NotInForce` in eager code: dynamo of torch 2.11 fails at a `raise` that it traces after a graph break."""
    raise NotInForce(
        f"{layer._mpguard_fp8.name or 'the model'}: its input is on the CPU, which has no FP8 matmuls. Move "
        'the model and the batch (`model.to("cuda")`), or set fp8_emulate=True to compute FP8 in software'
    )
