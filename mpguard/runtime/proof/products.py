"""The matmuls ("products") among the operators that ran: kind, dtype of the operands, and floating-point operations.

A convolution, attention, a recurrent layer and an FFT count as matmuls: they multiply and add. They are found by
the operator's name; their work follows from the shapes of the operands. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpguard.policy.dtype import Dtype

Shapes = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Operator:
    """What is multiplied by an operator. factors: positions of the operands whose dtype counts."""

    factors: tuple[int, ...]
    work: Callable[[Shapes], int]
    attention: bool = False


@dataclasses.dataclass(frozen=True)
class Work:
    """Matmuls of one place. dtype: None if it is not known, in a kernel that is no operator of torch.

    module: the number of the module in which they ran; None if unknown. name: of the kernel whose dtype is not known.
    by_script: True in a region in which the script has switched autocast off. evaluated: True in a call of a trained
    model without gradients. wide_only: True in an operator that has no 16 bits, see `is_wide_only`. in_the_loss:
    True for a matmul as a loss has, see `Inferred`.
    """

    dtype: str | None
    attention: bool = False
    module: int | None = None
    compiled: bool = False
    name: str = ""
    by_script: bool = False
    evaluated: bool = False
    wide_only: bool = False
    in_the_loss: bool = False


def _matrix(left: int, right: int) -> Operator:
    """Matmuls, also batched and grouped ones, and those of a vector: each element of the left one is used for
    each column of the right one."""

    def work(shapes: Shapes) -> int:
        columns = shapes[right][-1] if len(shapes[right]) > 1 else 1
        return 2 * math.prod(shapes[left]) * columns

    return Operator((left, right), work)


def _linear(inputs: int, weight: int) -> Operator:
    return Operator((inputs, weight), lambda shapes: 2 * math.prod(shapes[inputs]) * shapes[weight][0])


def _convolution(inputs: int, weight: int, times: int = 1) -> Operator:
    """Convolutions. Their stride is not known here: as many positions as the input (for backward: the output) has."""

    def work(shapes: Shapes) -> int:
        batch, positions = shapes[inputs][0], math.prod(shapes[inputs][2:])
        return 2 * times * batch * positions * math.prod(shapes[weight])

    return Operator((inputs, weight), work)


def _attention(query: int, times: float = 1) -> Operator:
    """Attention: queries with keys, weights with values. Operands are (batch, heads, tokens, size)."""

    def work(shapes: Shapes) -> int:
        keys = shapes[query + 1]
        return int(4 * times * math.prod(shapes[query])) * (keys[-2] if len(keys) > 1 else 1)

    return Operator((query, query + 1, query + 2), work, attention=True)


def _recurrent(times: int, *weights: int) -> Operator:
    """Recurrent layers: each input row is multiplied by the weights; (steps, batch, size)."""

    def work(shapes: Shapes) -> int:
        matrices = [shape for position in weights for shape in _flat(shapes[position]) if len(shape) == 2]
        return 2 * times * math.prod(shapes[0][:-1]) * sum(map(math.prod, matrices))

    return Operator((0, *weights), work)


def _flat(shape: Sequence[int] | Shapes) -> Shapes:
    """Return a list of tensors as their shapes; one tensor as a list of its shape."""
    return shape if shape and not isinstance(shape[0], int) else [shape]  # type: ignore[list-item,return-value]


def _transform(shapes: Shapes) -> int:
    """Fourier transforms: 5 n log2(n) per transform."""
    return 5 * math.prod(shapes[0]) * max(1, math.ceil(math.log2(max(2, shapes[0][-1]))))


_FFT = Operator((0,), _transform)

#: Operators that multiply, by name. An operator that calls others of this table is not counted itself.
OPERATORS: dict[str, Operator] = {
    **{f"aten::{name}": _matrix(0, 1) for name in (
        "mm", "bmm", "mv", "dot", "vdot", "_scaled_mm", "_scaled_mm_v2", "_int_mm", "_grouped_mm", "_scaled_grouped_mm",
        "_scaled_grouped_mm_v2", "_weight_int8pack_mm", "_sparse_semi_structured_mm", "_cslt_sparse_mm",
        "_sparse_mm",
    )},
    **{f"aten::{name}": _matrix(1, 2) for name in (
        "addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation", "sparse_addmm", "_sparse_addmm",
        "_sparse_semi_structured_addmm",
    )},
    **{name: _linear(0, 1) for name in (
        "aten::mkldnn_linear", "mkldnn::_linear_pointwise", "mkl::_mkl_linear", "aten::_sparse_semi_structured_linear",
        "aten::_mixed_dtypes_linear", "aten::_weight_int4pack_mm", "aten::_weight_int4pack_mm_for_cpu",
    )},
    **{name: _convolution(0, 1) for name in (
        "aten::convolution", "aten::_convolution", "aten::convolution_overrideable", "aten::mkldnn_convolution",
        "aten::cudnn_convolution", "aten::cudnn_convolution_transpose", "aten::cudnn_convolution_relu",
        "aten::cudnn_convolution_add_relu", "aten::miopen_convolution", "aten::miopen_convolution_transpose",
        "aten::miopen_depthwise_convolution", "aten::_slow_conv2d_forward", "aten::slow_conv3d_forward",
        "aten::slow_conv_dilated2d", "aten::slow_conv_dilated3d", "aten::slow_conv_transpose2d",
        "aten::slow_conv_transpose3d", "aten::_conv_depthwise2d", "aten::conv_depthwise3d",
        "aten::_nnpack_spatial_convolution", "aten::_mps_convolution", "mkldnn::_convolution_pointwise",
        "mkldnn::_convolution_pointwise_", "mkldnn::_convolution_transpose_pointwise",
    )},
    **{name: _convolution(0, 2, times=2) for name in (
        "aten::convolution_backward", "aten::convolution_backward_overrideable", "aten::_slow_conv2d_backward",
        "aten::mkldnn_convolution_backward",
    )},
    **{f"aten::{name}": _attention(0) for name in (
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward",
        "_cudnn_attention_forward",
    )},
    **{f"aten::{name}": _attention(1, times=2.5) for name in (
        "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
        "_scaled_dot_product_fused_attention_overrideable_backward", "_flash_attention_backward",
        "_efficient_attention_backward", "_cudnn_attention_backward",
    )},
    "aten::mkldnn_rnn_layer": _recurrent(1, 1, 2),
    "aten::mkldnn_rnn_layer_backward": _recurrent(2, 1, 2),
    "aten::_cudnn_rnn": _recurrent(1, 1),
    "aten::_cudnn_rnn_backward": _recurrent(2, 1),
    "aten::miopen_rnn": _recurrent(1, 1),
    "aten::miopen_rnn_backward": _recurrent(2, 1),
    "aten::_trilinear": Operator((0, 1, 2), lambda shapes: 2 * shapes[0][0] * math.prod(shapes[1])),
    "aten::_cdist_forward": Operator((0, 1), lambda shapes: 2 * math.prod(shapes[0]) * shapes[1][-2]),
    "aten::_fft_r2c": _FFT,
    "aten::_fft_c2r": _FFT,
    "aten::_fft_c2c": _FFT,
}  # fmt: skip

#: Attention of other packages (flash_attn, xformers): custom operators with queries, keys and values.
OTHER_ATTENTION = re.compile(r"^(?!aten::)\w*(flash|attn|attention|fmha)\w*::\w+", re.IGNORECASE)

#: Operators that torch computes in FP32 or wider where autocast is on: Fourier transforms, distances, matrix functions
#: and decompositions, also by their older names. What they multiply inside is theirs. Autocast casts the operands of
#: the others to 16 bits.
WIDE_ONLY = re.compile(
    r"^aten::(_?fft_|stft|istft|_?cdist|matrix_exp|linalg_(?!multi_dot|vecdot)|cholesky|triangular_solve|lu_solve|"
    r"lu_unpack|ormqr|orgqr|geqrf|svd|pinverse|inverse|(qr|(log|slog)?det)$)"
)

#: Matmul kernels that Inductor generates, by their names: the operands are the first tensors.
TEMPLATE = re.compile(r"^triton_tem_.*?(mm|convolution|attention)")

#: Names in Kineto's events of the dtypes that can be multiplied.
DTYPES = {
    "float": "fp32", "double": "fp64", "c10::BFloat16": "bf16", "c10::Half": "fp16", "signed char": "int8",
    "unsigned char": "uint8", "short": "int16", "int": "int32", "long int": "int64", "long": "int64",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128", "c10::complex<c10::Half>": "complex32",
}  # fmt: skip


def operator(name: str) -> Operator | None:
    """Return what an operator multiplies; None if it is no matmul that mpguard knows."""
    known = OPERATORS.get(name)
    if known is not None:
        return known
    if TEMPLATE.match(name):
        return _attention(0) if "attention" in name else _convolution(0, 1) if "convolution" in name else _matrix(0, 1)
    if OTHER_ATTENTION.match(name):
        backward = "backward" in name or "bwd" in name
        return _attention(1, times=2.5) if backward else _attention(0)
    return None


def is_wide_only(name: str) -> bool:
    """True for an operator whose matmuls no autocast computes in 16 bits."""
    return WIDE_ONLY.match(name) is not None


def work_of(known: Operator, shapes: Shapes) -> int:
    """Return the floating-point operations of a matmul; 0 if the operands do not have the expected shapes."""
    try:
        return known.work(shapes)
    except (IndexError, TypeError):
        return 0


def dtype_of(known: Operator, dtypes: Sequence[str]) -> str | None:
    """Return the dtype in which a matmul computes: that of its narrowest floating operand. None if it has none."""
    found = [name for position in known.factors if position < len(dtypes) and (name := kineto_dtype(dtypes[position]))]
    floats = [name for name in found if not name.startswith(("int", "uint"))]
    return min(floats or found, key=bits, default=None)


@functools.cache
def short(dtype: Any) -> str:
    """Return the policy's short name of a torch dtype; torch's own name for a dtype that the policy does not have."""
    known = Dtype.of(dtype)
    return known.short if known else str(dtype).removeprefix("torch.")


def kineto_dtype(name: str) -> str | None:
    """Return the policy's short name of a dtype in Kineto's events; None for what is no tensor."""
    if "Float8" in name:
        return "fp8"
    if "Float4" in name:
        return "fp4"
    return DTYPES.get(name)


def bits(dtype: str) -> int:
    """Return the bits of a number by the short name of its dtype; each part of a complex number counts."""
    known = Dtype.spelled(dtype)
    if known is not None:
        return known.bits
    digits = re.search(r"\d+", dtype)
    width = int(digits[0]) if digits else 8  # another name is that of an 8-bit format
    return width // 2 if dtype.startswith("complex") else width


def conversions(converted: Mapping[tuple[str, str], int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the elements that were converted to a wider dtype, and those that went to a narrow dtype and back.

    Both by the narrow dtype; of two with 16 bits each is narrow. converted: elements by the dtypes before and after.
    """
    widened, rounded = Counter[str](), Counter[str]()
    for (narrow, wide), elements in converted.items():
        widened[narrow] += elements if bits(narrow) < bits(wide) else 0
        rounded[narrow] += min(elements, converted.get((wide, narrow), 0)) if bits(narrow) <= bits(wide) else 0
    return dict(+widened), dict(+rounded)
