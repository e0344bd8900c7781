"""FP8 copies of weights that are kept until an optimizer has stepped (`fp8_weight_cache`).

Without it a layer rounds its weight in each forward pass, so once per micro-batch under gradient accumulation.
Transformer Engine keeps the rounded weight if its layers are told which pass is the first one (`is_first_microbatch`).
The first pass of a layer is the one after any optimizer of the process has stepped, or after its weight is another
tensor or was changed in place. A change that torch does not count (`parameter.data.copy_`) is only seen if a step lies
before the next pass; so the proof compares the copies with the weights at each of its looks.

Only passes of a model in training mode keep a copy and use it.
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
    """The steps of all optimizers. replayed: a step is part of a CUDA graph, whose replays run no hook."""

    count = 0
    replayed = False


@functools.cache
def count_steps() -> None:
    """Register one hook permanently."""
    register_optimizer_step_post_hook(untraced(_count))


def _count(*_: Any) -> None:
    _Steps.count += 1
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        _Steps.replayed = True


def is_first_pass(layer: nn.Module) -> bool | None:
    """Return True if a layer has to round its weight and keep the copy, False if its copy is that of the weight.

    None: it rounds, and keeps nothing.
    """
    state: PaddingState = layer.__dict__["_mpguard_fp8"]
    weight = layer._parameters["weight"]
    if not layer.training or _Steps.replayed or weight is None or is_kept_in_fp8(weight):
        return None
    version = (_Steps.count, id(weight), weight.data_ptr(), weight._version)
    first = state.weight_version != version
    if state.weight_version is None or state.weight_version[0] != version[0]:
        state.passes = state.roundings = 0
    state.passes += 1
    state.roundings += first
    state.weight_version = version
    return first
