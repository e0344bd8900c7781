"""RNNs on CUDA under autocast: torch's kernel computes them in FP16, whatever the dtype of autocast is (S33).

`torch.nn.LSTM`, `GRU` and `RNN`, scripted or not, call the operator `aten::_cudnn_rnn`, whose kernel for autocast casts
input, states and weights to FP16. The kernel here casts them to the dtype of autocast.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import library as torch_library

#: The operator, and the names of the arguments that the kernel here casts, in their order.
OPERATOR, ARGUMENTS = "_cudnn_rnn", ("input", "weight", "weight_stride0", "weight_buf", "hx", "cx")

#: cuDNN computes RNNs in BF16 from this version on (9.13), on GPUs from this compute capability on.
CUDNN, CAPABILITY = 91300, (8, 0)

#: The registered kernels: they exist as long as the object does.
_libraries: list[Any] = []


def register(key: str = "AutocastCUDA") -> str | None:
    """Register the kernel for a dispatch key, once. Returns why that was not possible; None if it was."""
    if any(each.key == key for each in _libraries):
        return None
    operator = getattr(torch.ops.aten, OPERATOR, None)
    names = tuple(each.name for each in operator.default._schema.arguments) if operator is not None else ()
    if names[: len(ARGUMENTS)] != ARGUMENTS:
        return f"aten::{OPERATOR} has other arguments in the installed version"
    library: Any = torch_library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.key = key
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that torch's own kernel is overridden
        library.impl(OPERATOR, autocast_rnn, key)
    _libraries.append(library)
    return None


def autocast_rnn(
    input: torch.Tensor, weight: list[torch.Tensor], stride: int, _buffer: Any, hx: torch.Tensor, cx: Any, *more: Any
) -> Any:
    """Compute an RNN in the dtype of autocast; in FP32 where that is BF16, and cuDNN has no RNNs in BF16.

    The buffer of all weights is that of the uncast ones; without one, cuDNN makes it from the weights.
    """
    dtype = _compute_dtype(input)

    def cast(tensor: Any) -> Any:
        eligible = tensor is not None and tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.to(dtype) if eligible else tensor

    with torch.autocast(input.device.type, enabled=False):
        return torch.ops.aten._cudnn_rnn(
            cast(input), [cast(each) for each in weight], stride, None, cast(hx), cast(cx), *more
        )


def _compute_dtype(input: torch.Tensor) -> torch.dtype:
    dtype = torch.get_autocast_dtype(input.device.type)
    if dtype is not torch.bfloat16 or not input.is_cuda:
        return dtype
    version = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    capable = version >= CUDNN and torch.cuda.get_device_capability(input.device) >= CAPABILITY
    return dtype if capable else torch.float32
