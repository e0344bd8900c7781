"""`ScaledPasses`: the loss scales of the backward passes whose gradients a GradScaler divides at a step.

A step divides by one scale. Gradients of another scaler's loss, of a loss that was scaled twice, and of passes after
`unscale_` are then too large or too small by the scale.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mpguard.runtime.proof.gradients import leaves_behind
from mpguard.runtime.proof.inferred import node_of
from mpguard.runtime.proof.samples import is_capturing, local, sample

if TYPE_CHECKING:
    import torch

#: Parameters of an optimizer whose gradients show which passes count; nodes behind a loss that are searched for another
#: scaled loss; scaled losses that are remembered.
WATCHED, NODES, LOSSES = 4, 16, 64

OTHER = "backward ran on a loss that another GradScaler has scaled"
TWICE = "backward ran on a loss that was scaled twice"
PARTLY = "backward ran on a sum of losses of which a part was scaled"
LATE = "backward ran on a scaled loss after `unscale_`, so that its gradients are not divided by the scale"

#: What to do about each.
ADVICE = {
    OTHER: "Scale all losses of an optimizer with one GradScaler, and step it with that one",
    TWICE: "Scale each loss once: `accelerator.backward(loss)` does it itself",
    PARTLY: "Scale the sum, or each loss: the step divides all gradients by the scale",
    LATE: "Call scaler.unscale_(optimizer) once, after the last backward pass before the step",
}


#: The nodes of sums and differences.
SUMS = ("AddBackward0", "SubBackward0", "NegBackward0")

#: A node of autograd's graph: the thread that has created it, and its number there.
_Node = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class _Pass:
    """A pass. scalers: the ids of those that have scaled its loss. twice: True if one of them a scaled loss.

    partly: True if a parameter has a gradient of a term that none has scaled, next to one that was.
    """

    scalers: frozenset[int]
    twice: bool
    late: bool
    partly: bool


class ScaledPasses:
    """The passes that have added to the gradients of some parameters, by the parameters' ids."""

    def __init__(self) -> None:
        self._passes: dict[int, list[_Pass]] = {}
        self._unscaled: set[int] = set()  # parameters, since their gradients were set to zero
        self._scaled: dict[_Node, Any] = {}  # the scalers of losses
        self._nested: dict[_Node, float] = {}  # of losses that were scaled again: by how much
        self._open: set[int] = set()
        self._thread = 0  # of the pass that runs
        self._twice = False
        self._beside: set[int] = set()  # parameters behind what is added to a scaled loss

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:
        """Record that a scaler has scaled a loss."""
        from torch.utils._pytree import tree_leaves

        reference = weakref.ref(scaler)
        for before, after in zip(tree_leaves(loss), tree_leaves(scaled), strict=True):
            if getattr(after, "grad_fn", None) is None:
                continue
            inner = next((node for node in _behind(before) if node in self._scaled), None)
            if inner is not None:
                self._nested[inner] = scaler.get_scale()
            node = _node(after.grad_fn)
            self._scaled[node] = reference
            after.register_hook(lambda gradient, node=node: self._reached(node, gradient))
        while len(self._scaled) > LOSSES:
            first = next(iter(self._scaled))
            del self._scaled[first]
            self._nested.pop(first, None)

    def _reached(self, node: _Node, gradient: torch.Tensor) -> None:
        """Record that a pass goes through a scaled loss; the pass of another thread may run at the same time."""
        scaler = self._scaled[node]() if node in self._scaled else None
        if scaler is None or node[0] != self._thread:
            return
        self._open.add(id(scaler))
        again = self._nested.get(node)
        # A script may have divided the loss by the first scale before the second one.
        if again is not None and not is_capturing():
            self._twice |= float(gradient.max()) * scaler.get_scale() > 1.5 * again

    def begin_pass(self, outputs: Any, leaves: Iterable[torch.Tensor], optimizers: Iterable[Any]) -> list[int]:
        """Forget earlier passes of parameters whose gradients were set to zero. Return those that the pass reaches."""
        self._open, self._twice, self._thread = set(), False, threading.get_ident()
        self._beside = self._beside_scaled(outputs)
        reached, own = {id(leaf) for leaf in leaves}, []
        for optimizer in optimizers:
            for each in _watched(optimizer):
                if id(each) in reached:
                    own.append(id(each))
                    if each.grad is None or not bool(sample(each.grad).any()):
                        self._forget(id(each))
        return own

    def end_pass(self, own: Iterable[int]) -> None:
        """Record a pass. own: what `begin_pass` has returned."""
        for number in own:
            known = _Pass(frozenset(self._open), self._twice, number in self._unscaled, number in self._beside)
            self._passes.setdefault(number, []).append(known)

    def unscaled(self, optimizer: Any) -> None:
        """Record that the gradients of an optimizer were divided by the scale."""
        self._unscaled |= {id(each) for each in _watched(optimizer)}

    def step(self, scaler: Any, optimizer: Any) -> str:
        """Return what is wrong with the scales of the gradients that a step divides; empty if nothing is."""
        passes = []
        for each in _watched(optimizer):
            passes += self._passes.get(id(each), [])
            self._forget(id(each))
        if any(each.scalers and id(scaler) not in each.scalers for each in passes):
            return OTHER
        if any(each.twice for each in passes):
            return TWICE
        if any(each.scalers and each.partly for each in passes):
            return PARTLY
        return LATE if any(each.scalers and each.late for each in passes) else ""

    def scale_of(self, parameters: Iterable[Any]) -> float:
        """Return the scale of the gradients of parameters; 0.0 if they have none, or were divided by it."""
        for number in map(id, parameters):
            scalers = next((each.scalers for each in self._passes.get(number, ()) if each.scalers), frozenset[int]())
            if scalers and number not in self._unscaled:
                own = [scaler for reference in self._scaled.values() if (scaler := reference()) is not None]
                return next((float(each.get_scale()) for each in own if id(each) in scalers), 0.0)
        return 0.0

    def _beside_scaled(self, outputs: Any) -> set[int]:
        """Return the parameters behind the terms of a sum that no scaler has scaled, if one has scaled another term.

        A factor of the script may be the scale: what is behind a product or quotient is not known.
        """
        from torch.autograd.graph import GradientEdge

        todo, scaled, plain = list(map(node_of, outputs)), False, []
        for _ in range(NODES):
            node = todo.pop() if todo else None
            if node is None:
                continue
            if _node(node) in self._scaled:
                scaled = True
            elif node.name() in SUMS:
                todo += [each for each, _ in node.next_functions]
            elif not node.name().startswith(("Mul", "Div")):
                plain.append(GradientEdge(node, 0))
        return set(map(id, leaves_behind(plain))) if scaled and not todo else set()

    def _forget(self, number: int) -> None:
        self._passes.pop(number, None)
        self._unscaled.discard(number)


def _watched(optimizer: Any) -> list[Any]:
    """Return some parameters from all over an optimizer, whose gradients can be read."""
    own = [each for group in optimizer.param_groups for each in group["params"] if local(each).numel()]
    return own[:: max(1, len(own) // WATCHED)]


def _node(function: Any) -> _Node:
    return threading.get_ident(), function._sequence_nr()


def _behind(loss: Any) -> list[_Node]:
    """Return the first nodes behind a loss in autograd's graph."""
    todo, found = [getattr(loss, "grad_fn", None)], list[_Node]()
    while todo and len(found) < NODES:
        node = todo.pop(0)
        if node is not None:
            found.append(_node(node))
            todo += [each for each, _ in node.next_functions]
    return found
