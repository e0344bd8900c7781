"""Rows that are no multiple of what FP8 products need: padded with zeros inside the layer, and cut off again.

Zeros change no maximum, so no scale, and add nothing to a gradient. The last batch of an epoch and odd
sequence lengths cost a little; a run that pads all the time is told what multiple to use.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
import weakref

import torch
from torch import nn

from mpguard.core.errors import MpguardWarning
from mpguard.policy.policy import Policy

#: Calls of FP8 layers before the share of padded work is judged, and the share that is too much.
CALLS, SHARE = 100, 0.05


@dataclasses.dataclass(eq=False)
class Padding:
    """Of the layers of one model: multiply-adds in all, those on padding, and what has been said.

    trained: whether one of them has been called for a gradient.
    """

    multiple: int
    calls: int = 0
    work: int = 0
    padded: int = 0
    said: bool = False
    warned: bool = False
    trained: bool = False

    def count(self, layer: str, rows: int, added: int, size: int) -> None:
        self.calls += 1
        self.trained = self.trained or torch.is_grad_enabled()
        self.work += (rows + added) * size
        self.padded += added * size
        if added and not self.said:
            self.said = True
            _warn(
                f"{layer or 'the model'}: its input has {rows} rows, FP8 products need a multiple of {self.multiple}; "
                f"padded to {rows + added} inside the layer and cut off again (said once)"
            )
        if not self.warned and self.calls >= CALLS and self.padded > SHARE * self.work:
            self.warned = True
            _warn(
                f"{100 * self.padded / self.work:.0f} % of the work of the FP8 layers is on padding: rows (batch x "
                f"sequence length) are no multiple of {self.multiple}. Make them one"
            )

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        _all[self.number] = self

    def __setstate__(self, state: dict[str, object]) -> None:
        """Of a copy, which counts by itself."""
        self.__dict__ |= state
        self.__post_init__()


_numbers = itertools.count()
_all: weakref.WeakValueDictionary[int, Padding] = weakref.WeakValueDictionary()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compiled(number: int, layer: str, much: bool) -> None:
    """Called while a graph is made, not when it runs: how often each shape comes is not counted there.

    much: whether of a batch of the shapes that the graph is for more than `SHARE` of the work is on padding.
    """
    padding = _all.get(number)
    if padding is None:
        return
    texts = []
    if not padding.said:
        padding.said = True
        texts.append(
            f"{layer or 'the model'}: its input has a number of rows that is no multiple of {padding.multiple}, as FP8 "
            "products need it; padded inside the layer and cut off again (said once)"
        )
    if much and not padding.warned:
        padding.warned = True
        texts.append(
            f"{layer or 'the model'}: for a batch of this size more than {100 * SHARE:.0f} % of the work is on "
            f"padding: rows (batch x sequence length) are few, and no multiple of {padding.multiple}. Make them one, "
            "unless it is an epoch's last batch alone: compiled code does not count how often each size comes"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("always", MpguardWarning)  # as an error it would be one of the compiler's
        for text in texts:
            _warn(text)


def _warn(text: str) -> None:
    warnings.warn(MpguardWarning(text), stacklevel=2)


@dataclasses.dataclass
class PaddingState:
    """What a converted layer knows: its name, the policy, which attributes came with the conversion, or since.

    restored: whether a history of delayed scaling came from a checkpoint.
    """

    name: str
    policy: Policy
    padding: Padding
    added: tuple[str, ...] = ()
    restored: bool = False


class Padded(nn.Module):
    """Goes before the FP8 layer of a library: its `forward` sees multiples only."""

    in_features: int
    out_features: int
    _mpguard_fp8: PaddingState

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        state = self._mpguard_fp8
        multiple = state.padding.multiple
        *lead, width = input.shape
        rows = math.prod(lead)
        added = -rows % multiple if rows else multiple
        if added:
            input = nn.functional.pad(input.reshape(rows, width), (0, 0, 0, added))
        if torch.compiler.is_compiling():
            if added and added > SHARE * (rows + added):
                _compiled(state.padding.number, state.name, True)
            elif added:
                _compiled(state.padding.number, state.name, False)
            result: torch.Tensor = super().forward(input)
        else:
            state.padding.count(state.name, rows, added, self.in_features * self.out_features)
            before = set(self.__dict__)
            result = super().forward(input)
            if len(self.__dict__) != len(before):  # Transformer Engine keeps some when it first runs
                state.added += tuple(set(self.__dict__) - before)
        # No view: FSDP2 loses its hook where the model goes on in place on one.
        return result[:rows].reshape(*lead, self.out_features).clone() if added else result
