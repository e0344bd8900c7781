"""Recomputation of activation checkpoints under delayed scaling, as Transformer Engine's own `checkpoint` does it.

A checkpoint runs its part of the model again during the backward pass. By then the scales are those of the next step,
and the FP8 autocast around the model has ended. So the scales of each forward pass are kept until the next one, the
recomputation uses them, and what it adds to the history is taken back: losses and gradients are those of a run without
checkpoints. It needs no patch, and holds for each way to checkpoint: reentrant or not, of torch or of a wrapper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from mpguard.nn.fp8 import calibration
from mpguard.nn.fp8.amax_history import AmaxHistoryMixin

#: The tensors of a history that a forward pass uses, and changes.
_FORWARD = ("scale_fwd", "amax_history_fwd")


def is_recomputing() -> bool:
    """True inside a backward pass that computes a part of the forward pass again."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


def keep_scales(layers: Iterable[AmaxHistoryMixin]) -> None:
    """Keep the scales that a forward pass has used. Call it at its end, before the history is updated."""
    used = [layer for layer in layers if layer.has_history()]
    scales = [layer.history()["scale_fwd"] for layer in used]
    for layer, scale in zip(used, torch._foreach_mul(scales, 1.0) if scales else (), strict=True):
        layer._mpguard_fp8.forward_scale = scale


class SurroundingRegion:
    """Hooks that run a whole model inside FP8 autocast, which updates the history when it ends.

    calibrates: the policy has `fp8_calibration`.
    """

    def __init__(self, *, calibrates: bool = False) -> None:
        self.calibrates = calibrates
        self.open: list[Any] = []
        self.without_gradients = False

    def autocast(self, model: nn.Module) -> Any:
        """Return the library's context manager."""
        raise NotImplementedError

    def surround(self, model: nn.Module) -> None:
        """Register the hooks."""
        model.register_forward_pre_hook(self.enter)
        model.register_forward_hook(self.leave, always_call=True)

    def enter(self, model: nn.Module, _inputs: Any) -> None:
        # A model that is one checkpoint as a whole is called again. The forward pass has updated the history, unless
        # the checkpoint is reentrant: that runs it without gradients.
        again = is_recomputing() and not self.without_gradients
        self.open.append(contextlib.nullcontext() if again else self.autocast(model))
        self.open[-1].__enter__()

    def leave(self, model: nn.Module, _inputs: Any, _output: Any) -> None:
        if len(self.open) == 1:
            again = is_recomputing()
            if not again:
                self.without_gradients = not torch.is_grad_enabled()
            if torch.is_grad_enabled() and not again:
                keep_scales(_layers_of(model))
            if self.calibrates:
                # A model that is one reentrant checkpoint as a whole updates the history when it is computed again.
                trains = torch.is_grad_enabled() and (not again or self.without_gradients)
                calibration.end_forward(_layers_of(model), trains=trains)
        self.open.pop().__exit__(None, None, None)


def _layers_of(model: nn.Module) -> Iterator[AmaxHistoryMixin]:
    return (module for module in model.modules() if isinstance(module, AmaxHistoryMixin))


@contextlib.contextmanager
def as_in_forward(layer: AmaxHistoryMixin) -> Iterator[None]:
    """Give a layer the scales of its forward pass; restore the scales and the history of now at the end."""
    history = layer.history()
    now = {name: history[name].clone() for name in _FORWARD}
    if layer._mpguard_fp8.forward_scale is not None:
        history["scale_fwd"].copy_(layer._mpguard_fp8.forward_scale)
    try:
        yield
    finally:
        for name, value in now.items():
            history[name].copy_(value)
