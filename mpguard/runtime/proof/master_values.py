"""`MasterValues`: finds master weights and states in FP32 whose values are rounded, between steps or in one.

A step leaves weights and states, and the next step finds them: between the two only the script changes them.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mpguard.runtime.proof import recomputed, rounding, samples, witness
from mpguard.runtime.proof.handoffs import Witness
from mpguard.runtime.proof.recomputed import WEIGHT
from mpguard.runtime.proof.samples import is_allocated, is_capturing, local, safely, sample

if TYPE_CHECKING:
    import torch

#: Of how many parameters the memory is remembered, so that an exchange of it is noticed at each step.
REMEMBERED = 2


@dataclasses.dataclass
class _Memory:
    """The memory of some weights of an optimizer, which holds their values if `parameter.data` is replaced.

    count: of all parameters. places: of these weights, by group and position. moves: how often it was replaced. values:
    by the ids of the parameters.
    """

    count: int
    places: list[tuple[int, int]]
    moves: int = 0
    values: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def read(self, optimizer: Any) -> dict[int, torch.Tensor]:
        """Return the memory that the weights have now."""
        own = (optimizer.param_groups[a]["params"][b] for a, b in self.places)
        return {id(each): local(each).data for each in own}


class _Again:
    """The step of torch's optimizer, computed again for each parameter once. before: what it found, by parameter."""

    def __init__(self, optimizer: Any, before: dict[int, recomputed.Before]) -> None:
        self.optimizer = optimizer
        self._before = before
        self._values: dict[int, dict[str, torch.Tensor]] = {}

    def values(self, own: Any) -> dict[str, torch.Tensor]:
        """Return samples of a weight and its states after that step; nothing if it cannot be computed again."""
        base, known = recomputed.base_of(self.optimizer), self._before.get(id(own))
        if base is None or known is None:
            return {}
        if id(own) not in self._values:
            self._values[id(own)] = recomputed.after(self.optimizer, base, known)
        return self._values[id(own)]


class MasterValues:
    """Samples of the weights and states of optimizers around the steps that are recorded. Holds weak references.

    found: what was witnessed, by the id of the optimizer. suspected: sampled weights that look rounded after a step,
    without a witness, by the id of the optimizer and the dtype. began_in: by the id of the optimizer, the 16-bit dtype
    that had all values of its sampled weights before the step, or None. put_in: the same if the script has changed them
    since the last step, which had left others, without a witness.
    """

    def __init__(self, previous: MasterValues | None = None) -> None:
        """Remember the memory of weights that was known before."""
        self.found: dict[int, list[Witness]] = {}
        self.suspected: dict[int, Counter[str]] = {}
        self.began_in: dict[int, str | None] = {}
        self.put_in: dict[int, str | None] = {}
        self._left: dict[tuple[int, str], torch.Tensor] = {}  # by the id of the parameter and the name of the state
        self._to_hooks: dict[tuple[int, str], torch.Tensor] = {}  # what the step leaves to the hooks after it
        self._start: dict[int, torch.Tensor] = {}  # weights before the step that runs
        self._before: dict[int, recomputed.Before] = {}
        self._memory: weakref.WeakKeyDictionary[Any, _Memory] = (
            weakref.WeakKeyDictionary() if previous is None else previous._memory
        )

    def begin_gap(self, optimizer: Any) -> None:
        """Take samples of an optimizer's weights and states between two steps."""
        safely(self._leave, optimizer)

    def begin_step(self, optimizer: Any) -> None:
        """Compare the weights and states that a step finds with those that the last one left."""
        safely(self._begin_step, optimizer)

    def begin_hooks(self, optimizer: Any) -> None:
        """Take samples of what a step leaves to the hooks after it, with which `end_step` compares."""
        safely(self._leave_to_hooks, optimizer)

    def end_step(self, optimizer: Any) -> None:
        """Take samples of the weights that a step has updated, and compare those that it may have rounded itself."""
        safely(self._end_step, optimizer)

    def exchanged(self, optimizer: Any) -> list[Witness]:
        """Compare weights whose memory was replaced since the last step with the values that are left there."""
        return safely(self._exchanged, optimizer) or []

    def _leave(self, optimizer: Any) -> None:
        self._left |= {key: sample(values) for key, values in _values(optimizer)}

    def _leave_to_hooks(self, optimizer: Any) -> None:
        self._to_hooks = {key: sample(values) for key, values in _values(optimizer)}

    def _hooks_ended(self, optimizer: Any) -> None:
        left, self._to_hooks = self._to_hooks, {}
        for key, own in _values(optimizer) if left and id(optimizer) in self.found else ():
            if key in left:
                self._compare(optimizer, key, own, left[key].cpu(), sample(own).cpu(), when="in a hook after the step")

    def _begin_step(self, optimizer: Any) -> None:
        self.found[id(optimizer)] = []
        self.put_in.pop(id(optimizer), None)
        values = dict(_values(optimizer))
        now = {key: sample(each) for key, each in values.items()}
        known = [key for key in now if key in self._left]
        if known and not samples.are_equal([self._left[key] for key in known], [now[key] for key in known]):
            for key in known:
                self._compare(optimizer, key, values[key], self._left[key].cpu(), now[key].cpu())
            weights = [key for key in known if key[1] == WEIGHT]
            bits = rounding.bits_of([each[key][: samples.VALUES] for each in (self._left, now) for key in weights])
            if not self.found[id(optimizer)] and _dtype_of_all(bits[: len(weights)]) is None:
                self.put_in[id(optimizer)] = _dtype_of_all(bits[len(weights) :])
        for key in known:
            del self._left[key]
        self._start |= {key: each for (key, name), each in now.items() if name == WEIGHT}
        if recomputed.base_of(optimizer) is not None:
            self._before = {id(own): kept for own in _sampled(optimizer) if (kept := recomputed.before(optimizer, own))}

    def _compare(
        self,
        optimizer: Any,
        key: tuple[int, str],
        own: Any,
        left: torch.Tensor,
        found: torch.Tensor,
        *,
        when: str = "since the last step",
    ) -> None:
        if left.shape != found.shape or witness.same(left, found):
            return
        match = witness.rounded(left, found) or witness.on_grid(left, found, samples.row_of(own))
        if match is not None and match.factor == 1:
            self.found[id(optimizer)].append(_witnessed(key, own, match, when))

    def _end_step(self, optimizer: Any) -> None:
        self._hooks_ended(optimizer)
        own = _sampled(optimizer)
        before, self._before = self._before, {}
        after = [sample(each) for each in own]
        self._left |= {(id(each), WEIGHT): values for each, values in zip(own, after, strict=True)}
        # Here too, because ZeRO-3 gives its optimizer the parameters only while it steps.
        states = {key: sample(values) for key, values in _values(optimizer) if key[1] != WEIGHT}
        self._left |= states
        looks = self.suspected[id(optimizer)] = Counter()
        start = [self._start.pop(id(each), values) for each, values in zip(own, after, strict=True)]
        if id(optimizer) not in self.found:
            return
        again = _Again(optimizer, before)
        bits = rounding.bits_of([each[: samples.VALUES] for each in (*start, *after)])
        self.began_in[id(optimizer)] = _dtype_of_all(bits[: len(own)])
        for each, dtype, values in zip(own, _looks_rounded(bits, len(own)), after, strict=True):
            if dtype is not None and not self._is_rounded_in_step(again, each, WEIGHT, values):
                looks[dtype] += 1
        if before:
            by_id = {id(each): each for each in own}
            for (number, name), of_state in zip(states, rounding.bits_of(list(states.values())), strict=True):
                if rounding.rounded_bits(of_state) is not None:
                    self._is_rounded_in_step(again, by_id[number], name, states[number, name])

    def _is_rounded_in_step(self, again: _Again, own: Any, name: str, values: torch.Tensor) -> bool:
        """Compare a weight or a state with what torch's own step makes of it. name: of the state, or `WEIGHT`."""
        exact = again.values(own).get(name)
        match = witness.rounded(exact.cpu(), values.cpu()) if exact is not None else None
        if match is not None:
            self.found[id(again.optimizer)].append(_witnessed((id(own), name), own, match, "in the step"))
        return match is not None

    def _exchanged(self, optimizer: Any) -> list[Witness]:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._memory.get(optimizer)
        if known is None or known.count != count:
            known = self._memory[optimizer] = _Memory(count, _smallest(optimizer))
        before, known.values = known.values, known.read(optimizer)
        moved = [(key, old, known.values[key]) for key, old in before.items() if key in known.values]
        moved = [(key, old, new) for key, old, new in moved if _is_replaced(old, new)]
        known.moves += bool(moved)
        found = []
        for key, old, new in moved if not known.moves & (known.moves - 1) else ():  # some scripts do it at each step
            match = witness.rounded(sample(old).cpu(), sample(new).cpu())
            if match is not None and match.factor == 1:
                found.append(_witnessed((key, WEIGHT), new, match, "since the last step"))
        return found

    def forget_weight(self, number: int) -> None:
        """Forget what was left of one weight. number: its id."""
        self._left = {key: values for key, values in self._left.items() if key[0] != number}
        self._start.pop(number, None)
        self._before.pop(number, None)

    def forget(self) -> None:
        """Forget what was left: other weights were loaded."""
        self._left.clear()
        self._start.clear()
        self._to_hooks.clear()
        self._before.clear()
        self._memory.clear()


def _witnessed(key: tuple[int, str], own: Any, match: witness.Match, when: str) -> Witness:
    place = tuple(samples.place(own, match.number))
    return Witness("states" if key[1] != WEIGHT else "weights", when, key[0], match, place)


def _dtype_of_all(bits: Sequence[Sequence[int]]) -> str | None:
    """Return the 16-bit dtype that has all values of all samples with enough different ones."""
    dtypes = {rounding.rounded_bits(each) for each in bits if len(set(each)) >= rounding.ENOUGH}
    return next(iter(dtypes)) if len(dtypes) == 1 else None


def _looks_rounded(bits: Sequence[Sequence[int]], count: int) -> list[str | None]:
    """Return for each sample the 16-bit dtype of which all values are that a step has changed: a suspicion.

    Weights that began as zeros or ones are what the step has added. bits: of the samples before the step, `count` of
    them, and of those after it.
    """
    found = []
    for old, new in zip(bits[:count], bits[count:], strict=True):
        changed = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
        enough = len(old) == len(new) and len({a for a, _ in changed}) >= rounding.ENOUGH
        found.append(rounding.rounded_bits(b for _, b in changed) if enough else None)
    return found


def _is_replaced(old: torch.Tensor, new: torch.Tensor) -> bool:
    same_kind = old.shape == new.shape and old.dtype == new.dtype
    return same_kind and old.data_ptr() != new.data_ptr() and is_allocated(old) and is_allocated(new)


def _smallest(optimizer: Any) -> list[tuple[int, int]]:
    """Return the positions of the weights in FP32 with the fewest elements that suffice for a sample."""
    places = [(a, b) for a, group in enumerate(optimizer.param_groups) for b in range(len(group["params"]))]
    plain = {id(own): local(own).numel() for own in _plain(optimizer) if local(own).numel() >= samples.VALUES}
    sizes = {place: plain.get(id(optimizer.param_groups[place[0]]["params"][place[1]])) for place in places}
    return sorted((place for place, size in sizes.items() if size), key=lambda place: sizes[place] or 0)[:REMEMBERED]


def _values(optimizer: Any) -> Iterator[tuple[tuple[int, str], Any]]:
    """Yield the sampled weights, and their states in FP32 of the same shape, by parameter and name."""
    import torch

    inner = getattr(getattr(optimizer, "optim", None), "state", {})  # ZeroRedundancyOptimizer: of this rank's part
    for own in _sampled(optimizer):
        yield (id(own), WEIGHT), own
        states = optimizer.state.get(own) or inner.get(own)
        for name, state in states.items() if isinstance(states, dict) else ():
            whole = type(local(state)) is torch.Tensor and state.dtype is torch.float32
            if whole and local(state).shape == local(own).shape:
                yield (id(own), str(name)), state


def _sampled(optimizer: Any) -> list[Any]:
    """Return parameters in FP32 from all over an optimizer."""
    own = _plain(optimizer)
    return [own[number] for number in samples.choose(own)]


def _plain(optimizer: Any) -> list[Any]:
    """Return the parameters in FP32 of an optimizer that have their memory. Quantized tensors call themselves FP32."""
    import torch

    if is_capturing():
        return []
    plain = (torch.Tensor, torch.nn.Parameter)
    own = [each for group in optimizer.param_groups for each in group["params"] if type(local(each)) in plain]
    return [each for each in own if each.dtype is torch.float32 and is_allocated(each)]
