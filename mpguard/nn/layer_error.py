"""Measure what a format costs the two matmuls of a Linear layer that decide what it computes and how it learns.

    output           = input (rows, in)         @ weight (out, in) transposed
    weight gradient  = gradient (rows, out) transposed  @ input (rows, in)

Each operand is rounded along the dimension that its matmul sums over, and the result is compared with the one of the
same operands in FP32. The measure is the signal-to-noise ratio in dB: 20 dB is an error of 10 %, 40 dB one of 1 %.

Of the rows at most `ROWS` are used, and of the outputs at most `COLUMNS`: whole groups of 128, which are spread evenly.
Scales of a tensor or a row are those of all of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch

from mpguard.nn.number_formats import OperandRole, largest, rounded

#: How many rows of activations and gradients, and how many outputs of a layer, are measured at most.
ROWS, COLUMNS = 4096, 256

#: The size of the groups of rows that are measured together: formats have a scale for up to so many values.
GROUP = 128

#: How many rows are rounded at once on a CPU, so that what is between two operators stays in its cache.
AT_ONCE = 256

#: The ratio, in dB, that stands for no error at all.
EXACT = 150.0


@dataclasses.dataclass(frozen=True)
class TensorError:
    """How a format holds a tensor. underflow, saturated: shares of its values. snr: in dB; None for only zeros."""

    underflow: float
    saturated: float
    snr: float | None


@dataclasses.dataclass(frozen=True)
class ProductError:
    """What a format costs a matmul. snr: in dB; None if the matmul is zero. operands: by their role."""

    snr: float | None
    operands: dict[OperandRole, TensorError]


@dataclasses.dataclass(frozen=True)
class KeptInput:
    """The rows of an input that its weight gradient is computed from, and the largest values of the whole input.

    of_columns: (1, in). count: rows of the whole input.
    """

    rows: torch.Tensor
    of_tensor: torch.Tensor
    of_columns: torch.Tensor
    count: int


def sampled(matrix: torch.Tensor, most: int) -> torch.Tensor:
    """Return at most `most` rows of a matrix, as groups of 128 that are spread evenly: the same for the same size."""
    count = matrix.shape[0]
    if count <= most:
        return matrix
    groups = count // GROUP
    return (
        matrix[: groups * GROUP].view(groups, GROUP, -1)[:: -(-groups // (most // GROUP))].reshape(-1, matrix.shape[1])
    )


def keep(input: torch.Tensor) -> KeptInput:
    """Return what is kept of an input (rows, in) until its layer's backward pass: a copy of the rows."""
    of_columns = largest(input, 0)
    return KeptInput(sampled(input, ROWS).clone(), of_columns.amax(), of_columns, input.shape[0])


def output_errors(kept: KeptInput, weight: torch.Tensor, formats: Iterable[str]) -> dict[str, ProductError]:
    """Return the error of a layer's output in each format. weight: (out, in)."""
    left = _Operand("input", kept.rows.float(), kept.of_tensor, None)
    right = _Operand("weight", sampled(weight, COLUMNS).float(), largest(weight), None)
    return _errors(left, right, formats)


def weight_gradient_errors(
    kept: KeptInput, gradient: torch.Tensor, formats: Iterable[str], *, trained: bool
) -> dict[str, ProductError]:
    """Return the error of a layer's weight gradient in each format. gradient: of its output (rows, out).

    trained: False for a frozen weight, whose gradient is not computed: then only the operands are measured.
    """
    of_columns = largest(gradient, 0)
    of_tensor = of_columns.amax()
    columns = sampled(of_columns.t(), COLUMNS)
    rows = sampled(sampled(gradient, ROWS).t(), COLUMNS)  # (out, rows): whole groups of outputs
    left = _Operand("gradient", rows.float().contiguous(), of_tensor, columns)
    inputs = kept.rows.t().float().contiguous()
    right = _Operand("input", inputs, kept.of_tensor, kept.of_columns.t()) if trained else None
    return _errors(left, right, formats)


@dataclasses.dataclass(frozen=True)
class _Operand:
    """A matrix in FP32, and the largest values of the tensor that it is a part of, and of its rows."""

    role: OperandRole
    matrix: torch.Tensor
    of_tensor: torch.Tensor
    of_rows: torch.Tensor | None


def _errors(left: _Operand, right: _Operand | None, formats: Iterable[str]) -> dict[str, ProductError]:
    """Return the error of `left @ right.T` in each format; without `right` that of the operand."""
    exact = left.matrix @ right.matrix.t() if right is not None else None
    operands = [each for each in (left, right) if each is not None]
    formats, numbers = list(formats), []
    for name in formats:
        held = [_held(each, name) for each in operands]
        numbers += [number for _, found in held for number in found]
        if exact is not None:
            numbers += _energies(exact, held[0][0] @ held[1][0].t())
    values: list[float] = torch.stack(numbers).tolist()  # one wait for the device
    width = len(values) // max(1, len(formats))
    return {
        name: _error(values[at * width : (at + 1) * width], [each.role for each in operands])
        for at, name in enumerate(formats)
    }


def _error(numbers: list[float], roles: list[OperandRole]) -> ProductError:
    """Return the error of a format. numbers: those of `_held` for each operand, and the energies of the product."""
    errors = {
        role: TensorError(numbers[4 * at], numbers[4 * at + 1], _decibels(*numbers[4 * at + 2 : 4 * at + 4]))
        for at, role in enumerate(roles)
    }
    product = numbers[4 * len(roles) :]
    return ProductError(_decibels(*product) if product else None, errors)


def _held(operand: _Operand, name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return an operand in a format: its values, the shares that underflow and saturate, and two energies."""
    matrix = operand.matrix
    size = AT_ONCE if matrix.device.type == "cpu" else max(1, matrix.shape[0])
    values, found = [], []
    for at in range(0, matrix.shape[0], size):
        part = slice(at, at + size)
        of_rows = None if operand.of_rows is None else operand.of_rows[part]
        own = rounded(matrix[part], name, operand.role, operand.of_tensor, of_rows)
        values.append(own.values)
        counts = [each.double() / matrix.numel() for each in (own.underflow, own.saturated)]
        found.append(torch.stack([*counts, *_energies(matrix[part], own.values)]))
    return torch.cat(values), list(torch.stack(found).sum(0))


def _energies(exact: torch.Tensor, held: torch.Tensor) -> list[torch.Tensor]:
    """Return the energy of the values and of their error."""
    norm = torch.linalg.vector_norm
    return [norm(exact).double().square(), norm(held - exact).double().square()]


def _decibels(signal: float, noise: float) -> float | None:
    """Return the ratio of two energies; None without a signal, or if it is not finite."""
    if not 0 < signal < math.inf or not noise < math.inf:
        return None
    return EXACT if noise == 0 else min(EXACT, 10 * math.log10(signal / noise))


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor (..., values) as a matrix, without gradients."""
    return tensor.detach().reshape(-1, tensor.shape[-1])


def summary(errors: dict[str, ProductError]) -> dict[str, Any]:
    """Return the errors as plain data, for JSON."""
    return {name: dataclasses.asdict(each) for name, each in errors.items()}
