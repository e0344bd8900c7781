"""`ScriptSteps`: steps that a script applies itself, without an optimizer of torch.

Nothing calls mpguard then. That the weights were updated shows at the next backward pass, or at the end: their values
have changed. What the passes before computed was observed when they ended.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from mpguard.runtime.proof.gradients import LEAVES, is_allocated, is_capturing, sample

if TYPE_CHECKING:
    import torch

    from mpguard.runtime.proof.observe import Observed


class ScriptUpdate:
    """The leaves of the last backward pass that exist, in the place of an optimizer."""

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

    passes: their number. update: their leaves. seen: what was observed at the end of one of them.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.update = ScriptUpdate()
        self.seen: Observed | None = None
        self._samples: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []

    @property
    def due(self) -> bool:
        """True if what was computed up to the last pass is to be observed: passes 1, 2, 4, 8, ..."""
        return self.passes & (self.passes - 1) == 0

    def record_pass(self, leaves: list[torch.Tensor]) -> None:
        """Record that a backward pass has ended. leaves: those whose gradients it has made."""
        self.passes += 1
        self.update.replace(leaves)
        sampled = [leaf for leaf in leaves[:: max(1, len(leaves) // LEAVES)] if is_allocated(leaf)]
        self._samples = [(weakref.ref(leaf), sample(leaf).clone()) for leaf in sampled]

    def forget(self) -> None:
        """Forget the values: a checkpoint was loaded, which is no update."""
        self._samples = []

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
        return self.seen is not None and self.is_applied()

    def is_idle(self) -> bool:
        """True if passes were recorded, and all sampled values are known to be as they were."""
        known = all(reference() is not None for reference, _ in self._samples)
        return bool(self._samples) and known and not self.is_applied()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
