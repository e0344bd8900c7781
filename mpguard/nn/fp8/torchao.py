"""torchao's FP8 layer. Imports torchao, so only `convert` imports this module, when a policy needs it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear as Torchao

from mpguard.core.errors import NotInForce
from mpguard.nn.fp8.padding import Padded
from mpguard.policy.policy import Policy
from mpguard.targets.plugin import get


class TorchaoFloat8Linear(Padded, Torchao):  # type: ignore[misc]
    """torchao's `Float8Linear` for any number of rows, and under autocast of any device."""

    config: Float8LinearConfig

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        device = input.device.type
        if device == "cpu" and not self.config.emulate:
            raise NotInForce(
                f"{self._mpguard_fp8.name or 'the model'}: its input is on the CPU, which has no FP8 products. Move "
                'the model and the batch (`model.to("cuda")`), or set fp8_emulate=True to compute FP8 in software'
            )
        if torch.is_autocast_enabled(device):  # torchao itself reads only the state of CUDA's autocast
            input = input.to(torch.get_autocast_dtype(device))
        return super().forward(input)


#: The FP8 layer of this library, which `convert` puts in place of `nn.Linear`.
LINEAR = TorchaoFloat8Linear


def templates(policy: Policy) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that creates torchao's layer for a plain layer, of the same sizes, without data.

    Without float8 all-gather, which would replace the model's parameters.
    """
    config = get("torchao").build(policy)

    def template(layer: nn.Linear) -> nn.Module:
        empty = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        converted: nn.Module = convert_to_float8_training(empty, config=config)
        return converted

    return template
