"""Run a tape forward and backward, and record how much memory is alive: what torch's caching allocator would count."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from mpguard.estimate.tape import PRODUCTS, Op, Storage, Tape, Value
from mpguard.estimate.weights import Weight

#: The allocator of CUDA rounds each tensor up to this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
ROUNDING = 512


def rounded(size: int, rounding: int = ROUNDING) -> int:
    """Return the bytes that a tensor takes."""
    return -(-size // rounding) * rounding


@dataclasses.dataclass(frozen=True)
class Alive:
    """What is alive at one moment, in bytes, by kind: activation, logits, copy (of weights), gradient."""

    kinds: Counter[str]

    @property
    def total(self) -> int:
        """The sum."""
        return sum(self.kinds.values())


@dataclasses.dataclass(frozen=True)
class Step:
    """forward, backward: what is alive at their peaks. between: after the forward pass, with all that is saved.

    largest: the bytes of the largest tensor that is allocated in both.
    """

    forward: Alive
    between: Alive
    backward: Alive
    largest: int


class _Gradient:
    """The memory of a gradient, which several values may share."""

    __slots__ = ("kind", "size", "users")

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.users, self.kind = size, 0, kind


class Replay:
    """One pass over a tape.

    checkpointing: blocks are computed again in the backward pass. kept: bytes of a parameter's gradient that stay after
    the backward pass of its block; None: all. workspace: count what CUDA's kernels allocate themselves. compiled: the
    tape was fused: gradients between fused operators have no memory, and AOTAutograd makes zeros for the logits'.
    """

    def __init__(
        self,
        tape: Tape,
        *,
        checkpointing: bool = False,
        kept: Callable[[Weight], int] | None = None,
        rounding: int = ROUNDING,
        workspace: bool = True,
        in_place: bool = True,
        compiled: bool = False,
    ) -> None:
        self.ops, self.returned = tape.ops, dict.fromkeys(tape.returned)
        self.checkpointing, self.kept = checkpointing, kept
        self.rounding, self.workspace, self.in_place, self.compiled = rounding, workspace, in_place, compiled
        self.now: Counter[str] = Counter()
        self.peak, self.largest = Alive(Counter()), 0
        self._holders: Counter[Storage] = Counter()
        self._gradients: dict[Value, _Gradient] = {}
        self._unsharded: dict[Weight, int] = {}
        self._fused: list[Storage] = []
        self._last = {value.storage: index for index, op in enumerate(self.ops) for value in (*op.inputs, op.output)}
        self._kept_alive = {value.storage for value in tape.returned}

    def run(self) -> Step:
        """Run forward and backward."""
        segments = self._segments()
        self._forward(range(len(self.ops)), segments)
        for storage in [each for each in self._holders if each.kind == "copy"]:
            self._release(storage)  # autocast forgets its copies where it ends
        for value in self.returned:
            self._release(value.storage)
        forward, between = self.peak, Alive(self.now.copy())
        self.peak = between
        self._backward(segments)
        return Step(forward, between, self.peak, self.largest)

    # -- memory ------------------------------------------------------------------------------------------------------

    def _hold(self, storage: Storage) -> None:
        if storage.kind in ("weight", "input"):
            return
        if not self._holders[storage]:
            self._add(storage.kind, storage.size)
        self._holders[storage] += 1

    def _release(self, storage: Storage) -> None:
        if storage.kind in ("weight", "input") or not self._holders[storage]:
            return
        self._holders[storage] -= 1
        if not self._holders[storage]:
            del self._holders[storage]
            self._add(storage.kind, -storage.size)

    def _add(self, kind: str, size: int) -> None:
        self.now[kind] += rounded(size, self.rounding) if size > 0 else -rounded(-size, self.rounding)
        self.largest = max(self.largest, size)
        if size > 0 and sum(self.now.values()) > self.peak.total:
            self.peak = Alive(self.now.copy())

    # -- forward -----------------------------------------------------------------------------------------------------

    def _segments(self) -> dict[int, range]:
        """Return the operators of each block that is computed again; empty without checkpointing."""
        if not self.checkpointing:
            return {}
        found: dict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(self.ops):
            if op.segment is not None:
                found[op.segment].append(index)
        return {segment: range(indexes[0], indexes[-1] + 1) for segment, indexes in found.items()}

    def _forward(self, indexes: Iterable[int], segments: dict[int, range]) -> None:
        """Run operators. What a checkpointed block would save is not kept, but its inputs are."""
        for index in indexes:
            op = self.ops[index]
            again = segments.get(op.segment) if op.segment is not None else None
            for value in op.inputs:
                if value.storage not in self._holders:
                    self._hold(value.storage)  # a constant
            if again is not None and index == again.start:
                for storage in self._outer_inputs(again):
                    self._hold(storage)
            if op.output.storage not in self._holders:
                self._hold(op.output.storage)
            for storage in op.saved:
                if storage not in self._holders:  # made by the operator itself
                    self._hold(storage)
                    if again is not None:
                        self._release(storage)
                        continue
                elif again is None:
                    self._hold(storage)
            self._end_of_use(index, op)

    def _end_of_use(self, index: int, op: Op) -> None:
        for storage in {value.storage for value in (*op.inputs, op.output)}:
            if self._last.get(storage) == index and storage.kind != "copy" and storage not in self._kept_alive:
                self._release(storage)

    def _outer_inputs(self, block: range) -> set[Storage]:
        """Return the storages that a block uses and does not make."""
        made = {self.ops[index].output.storage for index in block}
        used = {value.storage for index in block for value in self.ops[index].inputs}
        return used - made

    # -- backward ----------------------------------------------------------------------------------------------------

    def _backward(self, segments: dict[int, range]) -> None:
        loss = self.ops[-1].output
        self._receive(loss, _Gradient(loss.count * loss.width, "activation"), True)
        for logits in list(self.returned)[-1:] if self.compiled else ():
            zeros = Storage(logits.storage.size, logits.storage.kind)
            self._hold(zeros)
            self._fused.append(zeros)
        for index in range(len(self.ops) - 1, -1, -1):
            op = self.ops[index]
            again = segments.get(op.segment) if op.segment is not None else None
            if again is not None and index == again[-1]:
                self._compute_again(again)
            self._backward_of(op)
            if again is not None and index == again.start:
                for storage in self._outer_inputs(again):
                    self._release(storage)
            before = self.ops[index - 1].segment if index else None
            if op.segment is not None and (not index or before != op.segment):
                self._reduce(lambda weight, block=op.segment: weight.block == block)  # type: ignore[misc]
        self._reduce(lambda _: True)

    def _compute_again(self, block: range) -> None:
        """Compute a block again, this time with what its operators save."""
        last = {value.storage: index for index in block for value in (*self.ops[index].inputs, self.ops[index].output)}
        outer = self._outer_inputs(block)
        self._last.update({storage: index for storage, index in last.items() if storage not in outer})
        for index in block:
            op = self.ops[index]
            fresh = op.output.storage not in self._holders
            if fresh:
                self._hold(op.output.storage)
            for storage in op.saved:
                self._hold(storage)
            for storage in {value.storage for value in (*op.inputs, op.output)} - outer:
                if self._last[storage] == index:
                    self._release(storage)

    def _backward_of(self, op: Op) -> None:
        gradient = self._gradients.pop(op.output, None)
        if op.name in PRODUCTS:
            self._end_of_kernel()
        if gradient is not None:
            if self.workspace and op.workspace:
                self._add("activation", op.workspace)
            for value in dict.fromkeys(op.inputs):
                if value.grad:
                    self._send(op, value, gradient)
            if self.workspace and op.workspace:
                self._add("activation", -op.workspace)
            self._drop(gradient)
        self._fused += op.saved
        if not self.compiled or op.name in PRODUCTS:
            self._end_of_kernel()

    def _end_of_kernel(self) -> None:
        """Free what a kernel has read: each operator is one, or the fused ones between two matmuls are."""
        for storage in self._fused:
            self._release(storage)
        self._fused.clear()

    def _size(self, value: Value) -> int:
        """Return the bytes of a value's gradient."""
        return 0 if self.compiled and not value.storage.size else value.count * value.width

    def _send(self, op: Op, value: Value, gradient: _Gradient) -> None:
        """Make the gradient of an input from that of the output."""
        same = value.count == op.output.count or op.name == "cat"
        if op.passes and value.width == op.output.width and same:
            self._receive(value, gradient, False)
            return
        whole = op.output.count * op.output.width
        if value.count < op.output.count and op.name in ("mul", "add"):  # broadcast: made whole, and summed
            self._add("activation", whole)
            self._receive(value, _Gradient(self._size(value), op.output.storage.kind), True)
            self._add("activation", -whole)
            return
        self._receive(value, _Gradient(self._size(value), op.output.storage.kind), True)

    def _receive(self, value: Value, gradient: _Gradient, fresh: bool) -> None:
        if value.weight is not None:
            self._accumulate(value, value.weight, gradient, fresh)
            return
        if fresh:
            self._add(gradient.kind, gradient.size)
        known = self._gradients.get(value)
        if known is None:
            gradient.users += 1
            self._gradients[value] = gradient
        elif known.users == 1 and self.in_place:
            if fresh:
                self._add(gradient.kind, -gradient.size)
        else:
            total = _Gradient(self._size(value), gradient.kind)
            total.users = 1
            self._add(total.kind, total.size)
            self._drop(known)
            if fresh:
                self._add(gradient.kind, -gradient.size)
            self._gradients[value] = total

    def _drop(self, gradient: _Gradient) -> None:
        gradient.users -= 1
        if gradient.users <= 0:
            self._add(gradient.kind, -gradient.size)

    def _accumulate(self, value: Value, weight: Weight, gradient: _Gradient, fresh: bool) -> None:
        """Add to the gradient of a parameter, which stays."""
        size = value.count * value.width
        if weight in self._unsharded:
            extra = [gradient.size] * (int(fresh) + int(not self.in_place))
            for each in extra:
                self._add("activation", each)
            for each in extra:
                self._add("activation", -each)
            return
        self._unsharded[weight] = size
        self._add("gradient", size)

    def _reduce(self, selected: Callable[[Weight], bool]) -> None:
        """Replace the gradients of a block by what stays of them on this rank."""
        if self.kept is None:
            return
        for weight in [each for each in self._unsharded if selected(each)]:
            self._add("gradient", -self._unsharded.pop(weight))
            self._add("gradient", self.kept(weight))
