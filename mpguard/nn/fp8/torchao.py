"""torchao's FP8 layer. Imports torchao, so only `convert` imports this module, when a policy needs it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear as Torchao

from mpguard.nn.fp8 import filters
from mpguard.nn.fp8.padding import Padded
from mpguard.nn.fp8.torchao_inputs import prepared
from mpguard.policy.policy import Policy
from mpguard.targets.plugin import get


class TorchaoFloat8Linear(Padded, Torchao):  # type: ignore[misc]
    """torchao's `Float8Linear` for any number of rows, and under autocast of any device."""

    config: Float8LinearConfig

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(prepared(self, input))


def kind_of(layer: nn.Module) -> type[Padded]:
    """Return the FP8 layer of this library, which `convert` puts in place of `nn.Linear`, or of `Conv1D`."""
    if filters.is_conv1d(layer):
        from mpguard.nn.fp8.torchao_conv1d import TorchaoFloat8Conv1D

        return TorchaoFloat8Conv1D
    return TorchaoFloat8Linear


def templates(policy: Policy) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that creates torchao's layer for a plain layer, of the same sizes, without data.

    Without float8 all-gather, which would replace the model's parameters.
    """
    config = get("torchao").build(policy)

    def template(layer: nn.Linear) -> nn.Module:
        empty = nn.Linear(*filters.sizes_of(layer), bias=layer.bias is not None, device="meta")
        converted: nn.Module = convert_to_float8_training(empty, config=config)
        return converted

    return template
