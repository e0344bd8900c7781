"""torchao's layer with a scale per block of 128 values, as DeepSeek-V3 was trained. For 0.18, on Hopper.

E4M3, a scale per 1 x 128 values of activations and gradients and per 128 x 128 of weights. torchao's own conversion
refuses layers with a bias; here it is added to the result. The layer has no software form: its casts are Triton's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear, fp8_blockwise_mm

from mpguard.nn.fp8 import filters
from mpguard.nn.fp8.padding import Padded
from mpguard.nn.fp8.torchao_inputs import prepared
from mpguard.policy.policy import Policy


@dataclasses.dataclass(frozen=True)
class BlockwiseConfig:
    """How a layer multiplies. block: how many values share a scale in each direction."""

    recipe: str = "blockwise"
    emulate: bool = False
    block: int = 128


class AutocastBlockwiseLinear(Float8BlockwiseLinear):  # type: ignore[misc]
    """torchao's `Float8BlockwiseLinear`, cast by autocast as `nn.Linear` is, with a bias.

    Its matmuls are BF16, so that the input must be: under autocast, or from a model in BF16.
    """

    config: BlockwiseConfig

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = prepared(self, input)
        output: torch.Tensor = fp8_blockwise_mm.apply(
            input.contiguous(), self.weight.to(input.dtype), self.block_size, torch.bfloat16, self.use_triton
        )
        output = output.to(input.dtype)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class TorchaoBlockwiseLinear(Padded, AutocastBlockwiseLinear):
    """The same for any number of rows."""


def kind_of(_layer: nn.Module) -> type[Padded]:
    """Return the block-wise layer, which `convert` puts in place of `nn.Linear`."""
    return TorchaoBlockwiseLinear


def templates(_policy: Policy) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that creates torchao's layer for a plain layer, of the same sizes, without data.

    `use_triton` False: torch's own matmul (cuBLAS) of the blocks that Triton has cast.
    """

    def template(layer: nn.Linear) -> nn.Module:
        created: nn.Module = Float8BlockwiseLinear(
            *filters.sizes_of(layer), bias=layer.bias is not None, device="meta", use_triton=False
        )
        created.config = BlockwiseConfig()  # type: ignore[assignment]
        return created

    return template
