"""`ScriptSteps`: steps that a script applies itself, without an optimizer of torch.

Nothing calls mpguard then. That the weights were updated shows at the next backward pass, or at the end: their values
have changed, or other tensors of the same shapes and similar values are in their place, as in functional code. What the
passes before computed was observed when they ended.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from mpguard.runtime.proof.samples import choose, is_allocated, is_capturing, sample

if TYPE_CHECKING:
    import torch

    from mpguard.runtime.proof.observe import Observed


#: Of how many kinds of passes, which differ in the shapes of their leaves, the values are remembered.
KINDS = 8

#: Least similarity (cosine) of weights and what they are replaced by in an update. Batches have less.
SIMILAR = 0.5


class ScriptUpdate:
    """The leaves of the last backward pass that exist, in the place of an optimizer."""

    #: What messages call it.
    mpguard_name = "the script's own update"

    def __init__(self) -> None:
        self._leaves: list[weakref.ref[torch.Tensor]] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The leaves as an optimizer has its parameters."""
        return [{"params": [leaf for reference in self._leaves if (leaf := reference()) is not None]}]

    def replace(self, leaves: list[torch.Tensor]) -> None:
        """Set the leaves."""
        self._leaves = [weakref.ref(leaf) for leaf in leaves]

    def release(self, numbers: set[int]) -> None:
        """Release the weak references to leaves. numbers: their ids."""
        self._leaves = [reference for reference in self._leaves if id(reference()) not in numbers]


class ScriptSteps:
    """The backward passes of a script without optimizers. Holds weak references and small samples.

    passes: their number. update: their leaves. due: True if what was computed up to the last pass is to be observed: at
    passes 1, 2, 4, 8, ..., and at the first of a kind (of each model that the script updates). seen: what was observed
    then, by kind. repeats: True if all kinds were seen, because one came again. replaced: True if other tensors have
    taken the place of the leaves of an earlier pass. applies_returned: False from the first pass on that adds to
    `.grad`: gradients that `torch.autograd.grad` returns are checked in such a script, and not applied.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.update = ScriptUpdate()
        self.due = self.repeats = self.replaced = False
        self.seen: dict[tuple[Any, ...], Observed] = {}
        self.kind: tuple[Any, ...] = ()
        self.applies_returned = True
        self._of_weights = False
        self._samples: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self._earlier: dict[tuple[Any, ...], torch.Tensor | None] = {}
        self._looked_at = 0

    def record_pass(self, leaves: list[torch.Tensor], *, accumulates: bool) -> None:
        """Record that a backward pass has ended. leaves: those whose gradients it has made."""
        import torch

        if accumulates and self.applies_returned:
            self.applies_returned, self.repeats, self.passes = False, False, 0
            self.seen, self._earlier = {}, {}
        self.passes += 1
        self.update.replace(leaves)
        self._of_weights |= any(accumulates or isinstance(leaf, torch.nn.Parameter) for leaf in leaves)
        sampled = [leaf for leaf in (leaves[number] for number in choose(leaves)) if is_allocated(leaf)]
        self._samples = [(weakref.ref(leaf), sample(leaf)) for leaf in sampled]
        self.kind = tuple(tuple(leaf.shape) for leaf in leaves)
        self.repeats |= self.kind in self._earlier
        self.due = self.passes & (self.passes - 1) == 0 or self.kind not in self._earlier
        if sampled and not is_capturing():
            self._compare_with_earlier([values for _, values in self._samples])

    def _compare_with_earlier(self, values: list[torch.Tensor]) -> None:
        """Find out if the leaves of the last pass are those of an earlier one after an update."""
        import torch

        now = torch.cat([each.double().cpu() for each in values])
        before = self._earlier.pop(self.kind, None)
        if before is not None and before.shape == now.shape and not torch.equal(before, now):
            self.replaced |= float(before @ now) > SIMILAR * float(before.norm()) * float(now.norm())
        self._earlier[self.kind] = now
        if len(self._earlier) > KINDS:
            first = next(iter(self._earlier))
            del self._earlier[first]
            self.seen.pop(first, None)

    def is_last_of_check(self) -> bool:
        """Record that a pass was checked. Return True if one of each kind was, as far as they take turns."""
        self._looked_at = (self._looked_at + 1) % max(1, len(self._earlier))
        return not self._looked_at

    def forget(self) -> None:
        """Forget the values: a checkpoint was loaded, which is no update."""
        self._samples, self._earlier = [], dict.fromkeys(self._earlier)

    def release(self, numbers: set[int]) -> None:
        """Release the weak references to leaves. numbers: their ids."""
        self.update.release(numbers)
        self._samples = [pair for pair in self._samples if id(pair[0]()) not in numbers]

    def is_applied(self) -> bool:
        """True if sampled values have changed since the last pass."""
        return not is_capturing() and any(
            leaf is not None and is_allocated(leaf) and not _equal(sample(leaf), before)
            for leaf, before in ((reference(), before) for reference, before in self._samples)
        )

    def is_proof_due(self) -> bool:
        """True if passes were observed, and their gradients have been applied."""
        return bool(self.seen) and (self.replaced or self.is_applied())

    def is_idle(self) -> bool:
        """True if passes were recorded, and no weight was updated: the values of all are known to be as they were.

        Gradients of inputs alone (`torch.autograd.grad` for a saliency map, forces, an attack) train nothing either.
        """
        known = all(reference() is not None for reference, _ in self._samples) or not self._of_weights
        return bool(self._samples) and known and not self.replaced and not self.is_applied()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
