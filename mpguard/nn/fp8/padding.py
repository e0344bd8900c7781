"""Pad inputs whose number of rows is not a multiple that FP8 matmuls require, and cut the padding off again.

The padding is zeros, which change no maximum, so no scale, and add nothing to a gradient. For the last batch of an
epoch and odd sequence lengths the cost is small; a run that pads all the time gets a warning with the multiple to use.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import has_static_value, statically_known_true

from mpguard.core.errors import MpguardWarning
from mpguard.nn.fp8 import observation
from mpguard.policy.policy import Policy

#: Returns a size of the batch that code for any size is compiled for, without a guard on it. torch 2.11 has the second;
#: with a torch that has neither, the size is read, and another one is compiled again.
hint_of: Callable[[int], int] = getattr(
    symbolic_shapes, "optimization_hint", getattr(symbolic_shapes, "size_hint", int)
)

#: Calls of FP8 layers after which the share of work on padding is checked, and the largest share without a warning.
CALLS, SHARE = 100, 0.05


@dataclasses.dataclass(eq=False)
class Padding:
    """Counters of the layers of one model.

    calls: of all layers. work, padded: multiply-adds in total, and on padding. noted, warned: the message about padding
    at all, and about too much of it, has been given. trained: a layer has been called with gradients enabled.
    """

    multiple: int
    calls: int = 0
    work: int = 0
    padded: int = 0
    noted: bool = False
    warned: bool = False
    trained: bool = False

    def count(self, layer: str, rows: int, added: int, size: int) -> None:
        """Count a call of a layer with some rows, and rows that were added; warn where that is due.

        size: multiply-adds per row.
        """
        self.calls += 1
        self.trained = self.trained or torch.is_grad_enabled()
        self.work += (rows + added) * size
        self.padded += added * size
        if added and not self.noted:
            self.noted = True
            _warn(
                f"{layer or 'the model'}: its input has {rows} rows, FP8 matmuls need a multiple of {self.multiple}; "
                f"padded to {rows + added} inside the layer and cut off again (reported once)"
            )
        if not self.warned and self.calls >= CALLS and self.padded > SHARE * self.work:
            self.warned = True
            _warn(
                f"{100 * self.padded / self.work:.0f} % of the work of the FP8 layers is on padding: rows (batch x "
                f"sequence length) are not a multiple of {self.multiple}. Choose a batch size or sequence length so "
                "that they are"
            )

    def __post_init__(self) -> None:
        self.number = str(next(_numbers))  # dynamo makes an `int` that differs between models a symbol
        _all[self.number] = self

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore a copy, which has its own counters."""
        self.__dict__ |= state
        self.__post_init__()


_numbers = itertools.count()
_all: weakref.WeakValueDictionary[str, Padding] = weakref.WeakValueDictionary()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compiled(number: str, of_any_size: bool, much: bool) -> None:
    """Warn while a graph is compiled. Nothing is called when it runs, so the number of calls is not counted.

    The layer has no name here: it would be a constant of its graph, and each of a model's equal blocks would be
    compiled again. of_any_size: the graph is for any number of rows. much: more than `SHARE` of the work on the batch
    that it is compiled for is on padding.
    """
    padding = _all.get(number)
    if padding is None:
        return
    texts = []
    if not padding.noted:
        padding.noted = True
        what = "varies, and may not be" if of_any_size else "is not"
        texts.append(
            f"compiled code: the input of an FP8 layer has a number of rows that {what} a multiple of "
            f"{padding.multiple}, as FP8 matmuls need it; padded inside the layer and cut off again (reported once)"
        )
    if much and not padding.warned:
        padding.warned = True
        texts.append(
            f"compiled code: for a batch of this size more than {100 * SHARE:.0f} % of the work is on "
            f"padding: rows (batch x sequence length) are few, and not a multiple of {padding.multiple}. Choose a "
            "batch size or sequence length so that they are, unless this is only an epoch's last batch: compiled code "
            "does not count how often a size occurs"
        )
    with warnings.catch_warnings():
        warnings.simplefilter(
            "always", MpguardWarning
        )  # a warning raised as an error would be reported as the compiler's
        for text in texts:
            _warn(text)


def _warn(text: str) -> None:
    warnings.warn(MpguardWarning(text), stacklevel=2)


@dataclasses.dataclass
class PaddingState:
    """The state of a converted layer.

    name: of the layer. padding: the counters of the model. added: the attributes that the conversion, or a forward
    pass since, has added. restored: an amax history of delayed scaling was loaded from a checkpoint. forward_scale,
    first: what an activation checkpoint needs to run the layer again, see `recompute`. plain: the class of the layer
    before.
    calibrated_calls, calibrated_forward, calibrated_backward: calls in which scales were calibrated, and if the first
    pass of each kind is over; called: in the forward pass that runs: see `calibration`.
    weight_version: which values the FP8 copy of the weight has, None without a copy; reuses: the last pass has used it;
    passes, roundings: forward passes since the last step of an optimizer, and how often they rounded the weight; stale:
    the share of a copy that was not that of its weight, as a tensor: see `weight_cache`. key: see `observation.key_of`.
    """

    name: str
    policy: Policy
    padding: Padding
    added: tuple[str, ...] = ()
    restored: bool = False
    forward_scale: torch.Tensor | None = None
    first: bool = False
    plain: type[nn.Module] = nn.Linear
    calibrated_calls: int = 0
    calibrated_forward: bool = False
    calibrated_backward: bool = False
    called: bool = False
    weight_version: tuple[int, ...] | None = None
    reuses: bool = False
    passes: int = 0
    roundings: int = 0
    stale: torch.Tensor | None = None
    key: torch.Tensor | None = dataclasses.field(default=None, compare=False)


def _rows_to_add(rows: int, multiple: int) -> int:
    """Return the number of rows of padding. In code that is compiled for any size, never 0 unless no size needs any.

    A branch for sizes that need none would have the layer compiled once for each branch: an expert gets another number
    of tokens in each step.
    """
    of_any_size = torch.compiler.is_compiling() and not has_static_value(rows)
    if of_any_size and not statically_known_true(rows % multiple == 0):
        return multiple - rows % multiple
    return -rows % multiple if rows else multiple


class Padded(nn.Module):
    """Base class, placed before a library's FP8 layer, whose `forward` then gets only multiples."""

    in_features: int
    out_features: int
    _mpguard_fp8: PaddingState

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        state = self._mpguard_fp8
        multiple, given = state.padding.multiple, input
        *lead, width = input.shape
        rows = math.prod(lead)
        added = _rows_to_add(rows, multiple)
        if added:
            input = nn.functional.pad(input.reshape(rows, width), (0, 0, 0, added))
        if torch.compiler.is_compiling():
            if added:
                much = hint_of(added) > SHARE * hint_of(rows + added)
                _compiled(state.padding.number, not has_static_value(rows), much)
            result: torch.Tensor = super().forward(input)
        else:
            state.padding.count(state.name, rows, added, self.in_features * self.out_features)
            before = set(self.__dict__)
            result = super().forward(input)
            if len(self.__dict__) != len(before):  # Transformer Engine adds attributes in its first forward pass
                state.added += tuple(set(self.__dict__) - before)
        # `clone`, because FSDP2 loses its hook if the model changes a view in place.
        output = result[:rows].reshape(*lead, self.out_features).clone() if added else result
        if observation.enabled and torch.is_grad_enabled():
            output = observation.observed(self, given, output)
        return output
