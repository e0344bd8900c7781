"""Round tensors to the number formats of low-precision matmuls, in plain torch, on any device.

A format is that of the operands of one matmul: a matrix (rows, values) whose last dimension is summed over. Scales are
those of training: from the tensor's own values, not from a history.

    bf16        no scale
    tensorwise  E4M3, gradients E5M2 ("hybrid"); one scale per tensor
    rowwise     E4M3; one scale per row, a power of two
    blockwise   E4M3; one scale per 128 values, for weights per 128 x 128 (DeepSeek-V3)
    mxfp8       E4M3; one scale per 32 values, a power of two, rounded up so that nothing saturates
    nvfp4       E2M1; one E4M3 scale per 16 values, and one FP32 scale per tensor; rounded to nearest, without the
                Hadamard transform and the stochastic rounding that Transformer Engine has as options

The values are equal, bit for bit, to torchao's where it has the format: `tests/nn/test_number_formats.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import functional as F

OperandRole = Literal["input", "weight", "gradient"]

#: The smallest maximum that a scale is computed from, as in torchao: below it a tensor counts as zero.
SMALLEST = 1e-12

#: FP8 dtypes: bits of the mantissa, and the exponent of the smallest number that is not subnormal.
_FP8_BITS = {torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}

#: The largest numbers of E4M3, E5M2 and E2M1.
E4M3_MAX, E5M2_MAX, E2M1_MAX = 448.0, 57344.0, 6.0


@dataclasses.dataclass(frozen=True)
class Rounded:
    """A tensor as a format holds it, in FP32.

    underflow: how many values that are not zero have become zero. saturated: how many were above the largest number
    that their scale allows, and were clipped to it. Both are 0-d tensors.
    """

    values: torch.Tensor
    underflow: torch.Tensor
    saturated: torch.Tensor


#: Rounds a matrix in FP32. The second argument is the largest absolute value of the tensor: of all of it (0-d), and of
#: each row (rows, 1), where the matrix is a part of the tensor.
Rounder = Callable[[torch.Tensor, OperandRole, torch.Tensor, torch.Tensor], Rounded]


def largest(matrix: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the largest absolute value in FP32, without a copy of the matrix: of all, or along a dimension, kept."""
    if dim is None:
        low, high = torch.aminmax(matrix)
    else:
        low, high = torch.aminmax(matrix, dim=dim, keepdim=True)
    return torch.maximum(high, -low).float()


def _counted(matrix: torch.Tensor, scaled: torch.Tensor, most: float, values: torch.Tensor) -> Rounded:
    # A scale is rounded, so that the largest value of a tensor may be above the limit by its last bits.
    return Rounded(values, _underflow(matrix, values), (scaled.abs() > most * (1 + 2**-16)).sum())


def _underflow(matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return how many values that are not zero have become zero: a zero stays one."""
    return (matrix != 0).sum() - (values != 0).sum()  # `count_nonzero` has no rule for `vmap`


def _bf16(matrix: torch.Tensor, _role: OperandRole, _largest: torch.Tensor, _of_rows: torch.Tensor) -> Rounded:
    values = matrix.bfloat16().float()
    return Rounded(values, _underflow(matrix, values), torch.zeros((), device=matrix.device))


def _fp8_scale(largest: torch.Tensor, most: float, *, power_of_two: bool = False) -> torch.Tensor:
    """Return the factor that maps the largest value to the largest number of a format."""
    scale = (most / largest.double().clamp(min=SMALLEST)).float()
    return _power_of_two_below(scale) if power_of_two else scale


def _power_of_two_below(values: torch.Tensor) -> torch.Tensor:
    """Return FP32 values without their mantissa."""
    return (values.view(torch.int32) & 0x7F800000).view(torch.float32)


def cast(matrix: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Rounded:
    """Round a matrix in FP32 to a dtype, with the factor that it is multiplied with before."""
    most = torch.finfo(dtype).max
    scaled = matrix * scale
    return _counted(matrix, scaled, most, in_fp8(scaled.clamp(-most, most), dtype) / scale)


def in_fp8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round FP32 values that are in the range of an FP8 dtype to it, to nearest, ties to even.

    On a CPU without the dtype, whose cast back to FP32 takes ten times as long as an addition there.
    """
    if values.device.type != "cpu":
        return values.to(dtype).float()
    mantissa, lowest = _FP8_BITS[dtype]
    exponent = (values.view(torch.int32) & 0x7F800000).view(torch.float32)
    # FP32 has no bits below those of the sum's last place: the addition rounds, and the subtraction is exact.
    large = exponent.clamp(min=2.0**lowest) * (1.5 * 2.0 ** (23 - mantissa))
    return (values + large) - large


def _tensorwise(matrix: torch.Tensor, role: OperandRole, largest: torch.Tensor, _of_rows: torch.Tensor) -> Rounded:
    dtype = torch.float8_e5m2 if role == "gradient" else torch.float8_e4m3fn
    return cast(matrix, _fp8_scale(largest, torch.finfo(dtype).max), dtype)


def _rowwise(matrix: torch.Tensor, _role: OperandRole, _largest: torch.Tensor, of_rows: torch.Tensor) -> Rounded:
    return cast(matrix, _fp8_scale(of_rows, E4M3_MAX, power_of_two=True))


def _blockwise(matrix: torch.Tensor, role: OperandRole, _largest: torch.Tensor, _of_rows: torch.Tensor) -> Rounded:
    rows, columns = matrix.shape
    high = 128 if role == "weight" else 1
    padded = F.pad(matrix, (0, -columns % 128, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // 128, 128)
    scale = _fp8_scale(blocks.abs().amax((1, 3), keepdim=True), E4M3_MAX)
    scaled = blocks * scale
    values = in_fp8(scaled.clamp(-E4M3_MAX, E4M3_MAX), torch.float8_e4m3fn) * (1.0 / scale)  # what kernels get
    found = _counted(blocks, scaled, E4M3_MAX, values)
    return dataclasses.replace(found, values=values.reshape(padded.shape)[:rows, :columns])


def _in_blocks(matrix: torch.Tensor, size: int) -> torch.Tensor:
    """Return the matrix as (rows, blocks, size), filled up with zeros."""
    padded = F.pad(matrix, (0, -matrix.shape[1] % size))
    return padded.view(matrix.shape[0], -1, size)


def _mxfp8(matrix: torch.Tensor, _role: OperandRole, _largest: torch.Tensor, _of_rows: torch.Tensor) -> Rounded:
    blocks = _in_blocks(matrix, 32)
    exponent = torch.log2(blocks.abs().amax(2, keepdim=True) / E4M3_MAX).ceil().clamp(-127, 127)
    # The scale 2**-127 is not normal in FP32: torchao does not scale such blocks.
    scale = torch.where(exponent == -127, 1.0, torch.exp2(-exponent))
    scaled = blocks * scale
    values = in_fp8(scaled.clamp(-E4M3_MAX, E4M3_MAX), torch.float8_e4m3fn) * torch.exp2(exponent)
    found = _counted(blocks, scaled, E4M3_MAX, values)
    return dataclasses.replace(found, values=values.flatten(1)[:, : matrix.shape[1]])


def _nvfp4(matrix: torch.Tensor, _role: OperandRole, largest: torch.Tensor, _of_rows: torch.Tensor) -> Rounded:
    blocks = _in_blocks(matrix, 16)
    of_tensor = largest.clamp(min=SMALLEST) / (E4M3_MAX * E2M1_MAX)
    of_blocks = blocks.abs().amax(2, keepdim=True) / E2M1_MAX / of_tensor
    # The smallest normal number of E4M3, as in torchao: the scale of a block of zeros must not be zero.
    of_blocks = of_blocks.clamp(torch.finfo(torch.float8_e4m3fn).tiny, E4M3_MAX).to(torch.float8_e4m3fn).float()
    scaled = blocks * ((1.0 / of_tensor) / of_blocks)
    values = e2m1(scaled.clamp(-E2M1_MAX, E2M1_MAX)) * (of_blocks * of_tensor)
    found = _counted(blocks, scaled, E2M1_MAX, values)
    return dataclasses.replace(found, values=values.flatten(1)[:, : matrix.shape[1]])


def e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round values of at most 6 to E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6), to nearest, ties to even."""
    magnitude = values.abs()
    apart = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (values / apart).round() * apart


#: The formats, the coarsest scaling first.
FORMATS: dict[str, Rounder] = {
    "bf16": _bf16,
    "tensorwise": _tensorwise,
    "rowwise": _rowwise,
    "blockwise": _blockwise,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}


def rounded(
    matrix: torch.Tensor,
    name: str,
    role: OperandRole = "input",
    of_tensor: torch.Tensor | None = None,
    of_rows: torch.Tensor | None = None,
) -> Rounded:
    """Round a matrix (rows, values) to a format of `FORMATS`.

    of_tensor, of_rows: the largest absolute values of the tensor and of its rows, where the matrix is a part of it.
    """
    matrix = matrix.float()
    of_tensor = largest(matrix) if of_tensor is None else of_tensor
    of_rows = largest(matrix, 1) if of_rows is None else of_rows
    return FORMATS[name](matrix, role, of_tensor, of_rows)
