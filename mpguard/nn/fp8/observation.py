"""Show the tensors that FP8 layers cast to a listener, in eager and in compiled code. Nothing is shown by default.

Eager layers call the listener, and get the gradient of their output from a hook. In compiled code an operator of its
own, which the compiler does not look into, calls it: each call of it is a call of Python, and it makes the compiler
keep the input of the layer in memory. So it is in the graph only while there is a listener; a graph that was compiled
before is compiled again.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch
from torch import library, nn

from mpguard.nn.cuda_graphs import MODES


class Listener(Protocol):
    """Gets the tensors of FP8 layers, without gradients. due: it wants them now."""

    due: bool

    def forward(self, layer: nn.Module, input: torch.Tensor, weight: torch.Tensor) -> None:
        """Get what a layer has just multiplied."""

    def gradient(self, layer: nn.Module, gradient: torch.Tensor) -> None:
        """Get the gradient of a layer's output."""


#: True while there is a listener. Compiled code has a guard on it.
enabled = False

_listener: Listener | None = None
_layers: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def listen(listener: Listener | None) -> None:
    """Show the tensors of FP8 layers to a listener from here on; to none with None."""
    global enabled, _listener
    if listener is not None:
        _define_operators()
    enabled, _listener = listener is not None, listener


def observed(layer: Any, input: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Show what a layer has multiplied, and later the gradient of its output. Returns the output."""
    if torch.compiler.is_compiling():
        state = layer._mpguard_fp8
        if state.policy.compile_mode in MODES:  # a CUDA graph calls no Python
            return output
        torch.ops.mpguard.fp8_forward(input.detach(), layer.weight.detach(), state.key)
        watched: torch.Tensor = _Watched.apply(output, state.key)  # type: ignore[no-untyped-call]
        return watched
    _show(layer, input, output)
    return output


def hook(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    """Show the tensors of an FP8 layer that mpguard has not converted: a forward hook of it. Not in compiled code."""
    if enabled and not torch.compiler.is_compiling() and inputs and isinstance(output, torch.Tensor):
        _show(layer, inputs[0], output)


def key_of(layer: nn.Module) -> torch.Tensor:
    """Return the tensor by which compiled code names a layer: equal layers share their code, but no constants."""
    _layers[id(layer)] = layer
    return torch.tensor([id(layer)], device="cpu")


def _show(layer: Any, input: torch.Tensor, output: torch.Tensor) -> None:
    listener = _listener
    if listener is None or not listener.due or not torch.is_grad_enabled():
        return
    listener.forward(layer, input.detach(), layer.weight.detach())
    if output.requires_grad:
        output.register_hook(functools.partial(_show_gradient, layer))  # type: ignore[no-untyped-call]


def _show_gradient(layer: nn.Module, gradient: torch.Tensor) -> None:
    if _listener is not None:
        _listener.gradient(layer, gradient.detach())


class _Watched(torch.autograd.Function):
    """The output of a layer in compiled code, whose gradient is shown."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        ctx.key = key
        return output.clone()  # and no view, which the model could not change in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.ops.mpguard.fp8_backward(gradient, ctx.key)
        return gradient, None


@functools.cache
def _define_operators() -> None:
    """Define the operators that compiled code calls. `key` counts as changed, so that they are not left out."""

    @library.custom_op("mpguard::fp8_forward", mutates_args=("key",))
    def forward(input: torch.Tensor, weight: torch.Tensor, key: torch.Tensor) -> None:
        layer = _layers.get(int(key))
        if _listener is not None and _listener.due and layer is not None:
            _listener.forward(layer, input, weight)

    @library.custom_op("mpguard::fp8_backward", mutates_args=("key",))
    def backward(gradient: torch.Tensor, key: torch.Tensor) -> None:
        layer = _layers.get(int(key))
        if _listener is not None and _listener.due and layer is not None:
            _listener.gradient(layer, gradient)

    for operator in (forward, backward):
        operator.register_fake(lambda *_: None)
