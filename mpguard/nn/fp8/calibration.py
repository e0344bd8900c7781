"""The first scales of delayed scaling, computed from the tensors that they scale.

Delayed scaling takes a scale from the maxima of passes before, and begins with scales of 1. Gradients are smaller than
what E5M2 can hold with that, so the first steps lose them. With `fp8_calibration` each layer computes the scales of its
first forward and backward pass from its own input, weight and gradient, as current scaling does; these passes write the
history, from which all later scales are computed. It costs one maximum per tensor, once, and waits for nothing.

A layer whose history was loaded from a checkpoint is not calibrated.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from mpguard.nn.fp8.amax_history import AmaxHistoryMixin
from mpguard.nn.fp8.weights import is_kept_in_fp8

#: The largest values of E4M3 and E5M2.
E4M3_MAX, E5M2_MAX = 448.0, 57344.0


def is_due(layer: AmaxHistoryMixin) -> bool:
    """True until a layer has had its first forward and backward pass, if its policy has `fp8_calibration`."""
    state = layer._mpguard_fp8
    done = state.calibrated_forward and state.calibrated_backward
    return state.policy.fp8_calibration and not state.restored and not done


def scale_forward(layer: AmaxHistoryMixin, input: torch.Tensor) -> None:
    """Set the scales of a layer's input and weight, before its forward pass. A weight that is FP8 already has one."""
    if layer._mpguard_fp8.calibrated_forward:
        return
    scales, weight = layer.history()["scale_fwd"], layer._parameters["weight"]
    _set(layer, scales[0], input, E4M3_MAX)
    if weight is not None and not is_kept_in_fp8(weight):
        _set(layer, scales[1], weight, E4M3_MAX)


def scale_backward(layer: AmaxHistoryMixin, output: torch.Tensor) -> None:
    """Let the scale of a layer's gradient be set before its backward pass."""
    if output.requires_grad:
        output.register_hook(functools.partial(_scale_gradient, layer))  # type: ignore[no-untyped-call]


def end_forward(layers: Iterable[AmaxHistoryMixin]) -> None:
    """Record that the forward pass of a model with gradients has ended: its history has what later scales need."""
    for layer in layers:
        if layer.has_history():
            layer._mpguard_fp8.calibrated_forward = True


def _scale_gradient(layer: AmaxHistoryMixin, gradient: torch.Tensor) -> None:
    highest = E5M2_MAX if layer._mpguard_fp8.policy.fp8 == "hybrid" else E4M3_MAX
    _set(layer, layer.history()["scale_bwd"][0], gradient, highest)
    layer._mpguard_fp8.calibrated_backward = True


@torch.no_grad()
def _set(layer: AmaxHistoryMixin, scale: torch.Tensor, tensor: torch.Tensor, highest: float) -> None:
    """Set a scale with which the largest value of a tensor becomes the highest of the format, less the margin.

    Nothing changes for a tensor of zeros, or one that is not finite.
    """
    if not tensor.numel():
        return
    low, high = torch.aminmax(tensor.detach())
    amax = torch.maximum(-low, high).float()
    found = highest / amax / 2**layer._mpguard_fp8.policy.fp8_margin
    scale.copy_(torch.where(amax.isfinite() & found.isfinite(), found, scale))
