"""torchao's MXFP8 layer: E4M3 with a scale of a power of two for each 32 values. For 0.18.

On Blackwell it multiplies in MXFP8; with `fp8_emulate` torchao rounds to MXFP8 and multiplies in the compute dtype, on
any device: the numbers of Blackwell, not its speed. torchao's own conversion (`quantize_` with `MXFP8TrainingOpConfig`)
drops the bias of every layer, so the layer is used itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear, _to_mxfp8_then_scaled_mm
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from mpguard.nn.fp8 import filters
from mpguard.nn.fp8.padding import Padded
from mpguard.nn.fp8.torchao_inputs import prepared
from mpguard.policy.policy import Policy


@dataclasses.dataclass(frozen=True)
class Mxfp8Config:
    """How a layer multiplies. emulate: in software. block: how many values share a scale."""

    emulate: bool
    block: int = 32
    recipe: str = "mxfp8"


class AutocastMXFP8Linear(MXFP8Linear):  # type: ignore[misc]
    """torchao's `MXFP8Linear`, cast by autocast as `nn.Linear` is: input, weight and bias, and so the output."""

    config: Mxfp8Config

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = prepared(self, input)
        output: torch.Tensor = _to_mxfp8_then_scaled_mm(
            input,
            self.weight.to(input.dtype),
            kernel_preference=self.kernel_preference,
            scale_calculation_mode=self.scale_calculation_mode,
            wgrad_with_hp=self.wgrad_with_hp,
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)


class TorchaoMXFP8Linear(Padded, AutocastMXFP8Linear):
    """The same for any number of rows."""


def kind_of(_layer: nn.Module) -> type[Padded]:
    """Return the MXFP8 layer, which `convert` puts in place of `nn.Linear`."""
    return TorchaoMXFP8Linear


def templates(policy: Policy) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that creates torchao's layer for a plain layer, of the same sizes, without data."""
    preference = KernelPreference.EMULATED if policy.fp8_emulate else KernelPreference.AUTO

    def template(layer: nn.Linear) -> nn.Module:
        created: nn.Module = MXFP8Linear(
            *filters.sizes_of(layer), bias=layer.bias is not None, device="meta", kernel_preference=preference
        )
        created.config = Mxfp8Config(policy.fp8_emulate)  # type: ignore[assignment]
        return created

    return template
