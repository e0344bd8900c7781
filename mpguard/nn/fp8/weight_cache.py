"""FP8 copies of weights that are kept until an optimizer has stepped (`fp8_weight_cache`).

Without it a layer rounds its weight in each forward pass, so once per micro-batch under gradient accumulation.
Transformer Engine keeps the rounded weight if its layers are told which pass is the first one (`is_first_microbatch`).
The first pass of a layer is the one after any optimizer of the process has stepped, or after its weight is another
tensor or was changed in place. A change that torch does not count (`parameter.data.copy_`) is only seen if a step lies
before the next pass; so the proof compares the copies with the weights in each step that it examines.

Only passes of a model in training mode keep a copy and use it, and none that is recorded in a CUDA graph.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpguard.nn.compile import untraced
from mpguard.nn.fp8.padding import PaddingState
from mpguard.nn.fp8.weights import is_kept_in_fp8


class _Steps:
    """The steps of all optimizers. replayed: a step is part of a CUDA graph, whose replays run no hook.

    observed: the proof examines the passes, and compares the copies that they use.
    """

    count = 0
    replayed = False
    observed = False


@functools.cache
def count_steps() -> None:
    """Register one hook permanently."""
    register_optimizer_step_post_hook(untraced(_count))


def observe(on: bool) -> None:
    """Start or stop to compare the copies that passes use with their weights."""
    _Steps.observed = on


def is_observed() -> bool:
    """True if copies are to be compared."""
    return _Steps.observed


def _count(*_: Any) -> None:
    _Steps.count += 1
    _Steps.replayed = _Steps.replayed or _is_captured()


def _is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_first_pass(layer: nn.Module) -> bool | None:
    """Return True if a layer has to round its weight and keep the copy, False if its copy is that of the weight.

    None: it rounds, and keeps nothing.
    """
    state: PaddingState = layer.__dict__["_mpguard_fp8"]
    weight = layer._parameters.get("weight")
    state.reuses = False
    if (
        not layer.training
        or weight is None
        or is_kept_in_fp8(weight)
        or _Steps.replayed
        or _is_captured()
        or torch.is_inference_mode_enabled()
    ):
        return None
    version = (_Steps.count, id(weight), weight.data_ptr(), weight._version)
    # Before the first step of an optimizer: a script may update weights without one, and then clears the gradients.
    first = state.weight_version != version or (not _Steps.count and weight.grad is None)
    if state.weight_version is None or state.weight_version[0] != version[0]:
        state.passes = state.roundings = 0
    state.passes += 1
    state.roundings += first
    state.weight_version, state.reuses = version, not first
    return first
