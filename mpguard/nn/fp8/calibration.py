"""The first scales of delayed scaling, computed from the tensors that they scale.

Delayed scaling takes a scale from the maxima of passes before, and begins with scales of 1. Gradients are smaller than
what E5M2 can hold with that, so the first steps lose them. With `fp8_calibration` each layer computes the scales of its
first forward and backward pass from its own input, weight and gradient, as current scaling does; these passes write the
history, from which all later scales are computed. A tensor that is zero then, as the weight of a layer that begins with
zeros, is calibrated in a later one of its first passes. It costs one maximum per tensor in each of these, and waits for
nothing.

A history that was loaded from a checkpoint stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from mpguard.nn.fp8.amax_history import AmaxHistoryMixin
from mpguard.nn.fp8.weights import is_kept_in_fp8
from mpguard.policy.dtype import Dtype

#: Calls of a layer in which a tensor without a history is calibrated.
CALLS = 64


def is_due(layer: AmaxHistoryMixin) -> bool:
    """True in the first calls of a layer, if its policy has `fp8_calibration`."""
    state = layer._mpguard_fp8
    return state.policy.fp8_calibration and state.calibrated_calls < CALLS


def scale_forward(layer: AmaxHistoryMixin, input: torch.Tensor) -> None:
    """Set the scales of a layer's input and weight, before its forward pass. A weight that is FP8 already has one."""
    state = layer._mpguard_fp8
    state.calibrated_calls += 1
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    for number, tensor in enumerate((input, weight)):
        if not is_kept_in_fp8(tensor):
            _set(layer, ("fwd", number), tensor, Dtype.FP8_E4M3, first=not state.calibrated_forward)
    state.called = True


def scale_backward(layer: AmaxHistoryMixin, output: torch.Tensor) -> None:
    """Let the scale of a layer's gradient be set before its backward pass."""
    if output.requires_grad:
        output.register_hook(functools.partial(_scale_gradient, layer))  # type: ignore[no-untyped-call]


def end_forward(layers: Iterable[AmaxHistoryMixin], *, trains: bool) -> None:
    """Record that a forward pass of a model has ended. trains: its maxima are in the history now."""
    for layer in layers:
        state = layer._mpguard_fp8
        state.calibrated_forward = state.calibrated_forward or (state.called and trains)
        state.called = False


def _scale_gradient(layer: AmaxHistoryMixin, gradient: torch.Tensor | None) -> None:
    if gradient is None:  # the loss does not use what follows
        return
    state = layer._mpguard_fp8
    dtype = Dtype.FP8_E5M2 if state.policy.fp8 == "hybrid" else Dtype.FP8_E4M3
    _set(layer, ("bwd", 0), gradient, dtype, first=not state.calibrated_backward)
    state.calibrated_backward = True


def _set(layer: AmaxHistoryMixin, place: tuple[str, int], tensor: torch.Tensor, dtype: Dtype, *, first: bool) -> None:
    """Set a scale with which the largest value of a tensor becomes the largest of its FP8 dtype, less the margin.

    Not for a tensor of zeros, or one that is not finite. place: forward or backward, and the number of the tensor
    there. first: in the first pass; later only if the history is empty. A layer that is called again in its first pass
    keeps the lower scale: an activation checkpoint computes all its calls again with one.
    """
    if not tensor.numel():
        return
    state, (way, number) = layer._mpguard_fp8, place
    scale = layer.history()[f"scale_{way}"][number]
    past = layer.history()[f"amax_history_{way}"][:, number]
    # An evaluation in inference mode may have created the scale, and only this mode changes it then.
    with torch.no_grad(), torch.inference_mode(scale.is_inference()):
        low, high = torch.aminmax(tensor.detach())
        amax = torch.maximum(-low, high).float()
        found = dtype.largest / amax / 2**state.policy.fp8_margin
        use = amax.isfinite() & found.isfinite()
        if not first:
            use &= ~((past > 0) & past.isfinite()).any()
        elif way == "fwd" and state.called:
            found = torch.minimum(found, scale)
        scale.copy_(torch.where(use, found, scale))
