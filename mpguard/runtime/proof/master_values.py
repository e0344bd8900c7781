"""`MasterValues`: finds master weights in FP32 whose values are rounded to BF16 or FP16, between steps or in one."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mpguard.policy.dtype import Dtype
from mpguard.runtime.proof import rounding
from mpguard.runtime.proof.gradients import LEAVES, is_allocated, is_capturing, local, safely, sample

if TYPE_CHECKING:
    import torch


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
        self._before: dict[int, torch.Tensor] = {}
        self._states: dict[tuple[int, str], torch.Tensor] = {}  # after the last step

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
        exact = [own for own in _sampled(optimizer) if (known := self._exact.get(id(own))) and known() is own]
        return Counter(dtype for own in exact if (dtype := rounding.rounded_to(sample(own))) is not None)

    def _begin_gap(self, optimizer: Any) -> None:
        for key, state in _sampled_states(optimizer):
            self._states[key] = sample(state).clone()

    def _end_gap(self, optimizer: Any) -> None:
        found = self.rounded_states[id(optimizer)] = Counter()
        for key, state in _sampled_states(optimizer):
            before, now = self._states.pop(key, None), sample(state)
            if before is None or before.shape != now.shape or rounding.rounded_to(before) is not None:
                continue
            dtype = rounding.rounded_to(now)
            if dtype is not None and bool((now == before.to(Dtype.parse(dtype).torch).to(now.dtype)).all()):
                found[dtype] += 1

    def _begin_step(self, optimizer: Any) -> None:
        self._end_gap(optimizer)
        found = self.rounded[id(optimizer)] = Counter()
        for own in _sampled(optimizer):
            before = self._before[id(own)] = sample(own).clone()
            known = self._exact.get(id(own))
            dtype = rounding.rounded_to(before) if known is not None and known() is own else None
            if dtype is not None:
                found[dtype] += 1

    def _end_step(self, optimizer: Any) -> None:
        found = self.rounded.get(id(optimizer), Counter())
        for own in _sampled(optimizer):
            before, after = self._before.pop(id(own), None), sample(own)
            if before is None or before.shape != after.shape:
                continue
            changed = after != before
            if before[changed].unique().numel() < rounding.ENOUGH:  # type: ignore[no-untyped-call]
                continue  # weights that began as zeros or ones are what the step has added
            dtype = rounding.rounded_to(after[changed])
            if dtype is not None:
                found[dtype] += 1
            elif rounding.rounded_to(after) is None:
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


def _sampled(optimizer: Any) -> list[Any]:
    """Return parameters in FP32 with a gradient from all over an optimizer."""
    import torch

    if is_capturing():
        return []
    plain = (torch.Tensor, torch.nn.Parameter)  # a quantized tensor calls itself FP32
    own = [each for group in optimizer.param_groups for each in group["params"] if type(local(each)) in plain]
    own = [each for each in own if each.dtype is torch.float32 and is_allocated(each)]
    return own[:: max(1, len(own) // LEAVES)]
