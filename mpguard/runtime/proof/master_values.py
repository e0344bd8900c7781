"""`MasterValues`: finds master weights in FP32 whose values are rounded to BF16 or FP16, between steps or in one."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from mpguard.runtime.proof import rounding
from mpguard.runtime.proof.gradients import LEAVES, is_allocated, is_capturing, local, safely, sample


class MasterValues:
    """Compares samples of the weights before and after the steps that are recorded. Holds weak references.

    rounded: by the id of an optimizer, the number of its sampled parameters that were rounded, by dtype.
    rounded_states: the same for its states in FP32, between two steps.

    Weights that were loaded from a checkpoint in BF16 may begin as numbers of BF16, but no step in FP32 leaves them so.
    """

    def __init__(self, previous: MasterValues | None = None) -> None:
        """Begin with the weights that a recorder before has found to be exact."""
        self.rounded: dict[int, Counter[str]] = {}
        self.rounded_states: dict[int, Counter[str]] = {}
        self._exact: dict[int, weakref.ref[Any]] = {} if previous is None else previous._exact
        self._before: dict[int, list[int]] = {}  # bits of the samples
        self._states: dict[tuple[int, str], list[int]] = {}  # after the last step

    def begin_gap(self, optimizer: Any) -> None:
        """Take samples of an optimizer's states between two steps: the second one finds whether they were rounded."""
        safely(self._begin_gap, optimizer)

    def begin_step(self, optimizer: Any) -> None:
        """Take samples of the weights that a step is going to update, and look for exact ones that were rounded."""
        safely(self._begin_step, optimizer)

    def end_step(self, optimizer: Any) -> None:
        """Look for weights that the step has rounded, and remember those that are exact now."""
        safely(self._end_step, optimizer)

    def rounded_now(self, optimizer: Any) -> dict[str, int]:
        """Return the number of an optimizer's sampled weights that were exact, and are rounded now, by dtype."""
        return dict(safely(self._rounded_now, optimizer) or {})

    def _rounded_now(self, optimizer: Any) -> Counter[str]:
        exact = [own for own in _sampled(optimizer) if self._is_exact(own)]
        rounded = map(rounding.rounded_bits, _bits(exact))
        return Counter(dtype for dtype in rounded if dtype is not None)

    def _is_exact(self, own: Any) -> bool:
        known = self._exact.get(id(own))
        return known is not None and known() is own

    def _begin_gap(self, optimizer: Any) -> None:
        self._states |= _state_bits(optimizer)

    def _end_gap(self, optimizer: Any) -> None:
        found = self.rounded_states[id(optimizer)] = Counter()
        earlier, self._states = self._states, {}
        for key, now in (_state_bits(optimizer) if earlier else {}).items():
            before = earlier.pop(key, [])
            if len(before) != len(now) or rounding.rounded_bits(before) is not None:
                continue
            dtype = rounding.rounded_bits(now)
            if dtype is not None and rounding.rounded(before, dtype) == now:
                found[dtype] += 1
        self._states |= earlier  # those of other optimizers

    def _begin_step(self, optimizer: Any) -> None:
        self._end_gap(optimizer)
        found = self.rounded[id(optimizer)] = Counter()
        sampled = _sampled(optimizer)
        for own, before in zip(sampled, _bits(sampled), strict=True):
            self._before[id(own)] = before
            dtype = rounding.rounded_bits(before) if self._is_exact(own) else None
            if dtype is not None:
                found[dtype] += 1

    def _end_step(self, optimizer: Any) -> None:
        found = self.rounded.get(id(optimizer), Counter())
        sampled = _sampled(optimizer)
        for own, after in zip(sampled, _bits(sampled), strict=True):
            before = self._before.pop(id(own), [])
            if len(before) != len(after):
                continue
            changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
            if len({old for old, _ in changed}) < rounding.ENOUGH:
                continue  # weights that began as zeros or ones are what the step has added
            dtype = rounding.rounded_bits(new for _, new in changed)
            if dtype is not None:
                found[dtype] += 1
            elif rounding.rounded_bits(after) is None:
                self._exact[id(own)] = weakref.ref(own)

    def forget_weight(self, number: int) -> None:
        """Forget what was found in one weight. number: its id."""
        self._exact.pop(number, None)
        self._before.pop(number, None)

    def forget(self) -> None:
        """Forget what was found: other weights were loaded."""
        self._exact.clear()
        self._before.clear()
        self._states.clear()


def addresses(optimizer: Any) -> tuple[int, ...]:
    """Return where the first and the last weight of an optimizer are in memory: `parameter.data = ...` changes it."""
    groups = [group["params"] for group in optimizer.param_groups if group["params"]]
    ends = (groups[0][0], groups[-1][-1]) if groups else ()
    return tuple(int(local(own).data_ptr()) for own in ends)


def _sampled_states(optimizer: Any) -> Iterator[tuple[tuple[int, str], Any]]:
    """Yield the states in FP32 of sampled parameters that have their shape, by the id of the parameter and the name."""
    import torch

    for own in _sampled(optimizer):
        states = optimizer.state.get(own)
        for name, state in states.items() if isinstance(states, dict) else ():
            whole = type(local(state)) is torch.Tensor and state.dtype is torch.float32
            if whole and local(state).shape == local(own).shape:
                yield (id(own), str(name)), state


def _bits(tensors: Iterable[Any]) -> list[list[int]]:
    """Return the bits of the samples of tensors in FP32."""
    return rounding.bits_of([sample(each) for each in tensors])


def _state_bits(optimizer: Any) -> dict[tuple[int, str], list[int]]:
    """Return the bits of the samples of an optimizer's states, by the id of the parameter and the name."""
    states = dict(_sampled_states(optimizer))
    return dict(zip(states, _bits(states.values()), strict=True))


def _sampled(optimizer: Any) -> list[Any]:
    """Return parameters in FP32 with a gradient from all over an optimizer."""
    import torch

    if is_capturing():
        return []
    plain = (torch.Tensor, torch.nn.Parameter)  # a quantized tensor calls itself FP32
    own = [each for group in optimizer.param_groups for each in group["params"] if type(local(each)) in plain]
    own = [each for each in own if each.dtype is torch.float32 and is_allocated(each)]
    return own[:: max(1, len(own) // LEAVES)]
