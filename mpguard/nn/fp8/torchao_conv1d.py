"""transformers' `Conv1D` with torchao's FP8 matmuls. Imports both, so only `convert` imports this module.

It is no `nn.Linear`: its weight is transposed, and libraries (adapters, quantizers) tell the two apart by the class.
"""

from __future__ import annotations

from typing import Any

import torch
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from transformers.pytorch_utils import Conv1D

from mpguard.nn.fp8.padding import Padded
from mpguard.nn.fp8.torchao_inputs import prepared


class _Float8Conv1D(Conv1D):  # type: ignore[misc]
    linear_mm_config: Any
    config: Any

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = matmul_with_hp_or_float8_args.apply(
            prepared(self, input), self.weight, self.linear_mm_config, self.config
        )
        result: torch.Tensor = output + self.bias.to(output.dtype)
        return result


class TorchaoFloat8Conv1D(Padded, _Float8Conv1D):
    """`Conv1D` in FP8, for any number of rows, and under autocast of any device."""
