"""CUDA graphs of compiled models (`compile_mode: reduce-overhead`): gradients that outlive the memory of the graphs.

The graphs of a backward pass write gradients into memory of their own, which the next call of any compiled model may
overwrite. Under gradient accumulation torch then stops with "accessing tensor output of CUDAGraphs that has been
overwritten". So the gradients that compiled models still have when one of them is called are copied before, once per
optimizer step.

Importing this module does not import torch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

#: The modes of torch.compile that record CUDA graphs.
MODES = frozenset(("reduce-overhead", "max-autotune"))

#: The attribute of a gradient that was copied: later passes add to it in place.
COPIED = "_mpguard_copied"

#: Models that are compiled with CUDA graphs: the call of one begins a new generation of the graphs of all.
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Backward:
    """ended: a backward pass has ended since gradients were copied."""

    ended = False


def add(model: nn.Module) -> None:
    """Copy the gradients that a model still has when a compiled model is called."""
    _models.add(model)


def backward_ended() -> None:
    """Record that a backward pass has ended."""
    _Backward.ended = True


def keep_gradients(model: nn.Module) -> None:
    """Copy the gradients of all compiled models before this one is called, with or without gradients of its own."""
    import torch

    if not _Backward.ended or model not in _models or torch.compiler.is_compiling():
        return
    _Backward.ended = False
    parameters = {parameter for each in _models for parameter in each.parameters() if _is_in_a_graph(parameter)}
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()
        setattr(parameter.grad, COPIED, True)


def _is_in_a_graph(parameter: nn.Parameter) -> bool:
    gradient = parameter.grad
    return gradient is not None and gradient.is_cuda and not hasattr(gradient, COPIED)


def keeping_gradients(model: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `keep_gradients` before the compiled code of a model."""

    @functools.wraps(call)
    def keep_and_call(*args: Any, **kwargs: Any) -> Any:
        keep_gradients(model)
        return call(*args, **kwargs)

    return keep_and_call


def left_out() -> int:
    """Return for how many compiled graphs inductor has left out the CUDA graphs that their mode asks for."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"].get("cudagraph_skips", 0))
