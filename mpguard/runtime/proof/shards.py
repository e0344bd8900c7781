"""`Shards`: parameters of an optimizer whose gradients are what the script's own reduce-scatter has left on this rank.

Such a parameter is a part of a flat copy of the model (ZeRO by hand): each rank has another part, so that its gradient
differs between ranks, and is reduced all the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from mpguard.runtime.proof.collectives import Collective
from mpguard.runtime.proof.gradients import similar
from mpguard.runtime.proof.samples import local

if TYPE_CHECKING:
    import torch


class Shards:
    """The outputs of reduce-scatters of the script, and the gradients that hold them.

    found: ids of the parameters whose gradients do, at the beginning of a step.
    """

    def __init__(self) -> None:
        self.found: set[int] = set()
        self._outputs: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def record(self, call: Collective) -> None:
        """Record the output of a call that holds a part of summed gradients; it may not be filled yet."""
        self._outputs += [(weakref.ref(each), each.numel()) for each in call.outputs]

    def begin_step(self, parameters: Iterable[torch.Tensor], computed: Collection[int]) -> None:
        """Find the parameters whose gradients are outputs, or were made of them up to a factor.

        computed: ids of the tensors that backward passes have reached: shards are not among them. An output that no
        longer exists counts by its size.
        """
        outputs, self._outputs = self._outputs, []
        shards = [each for each in parameters if each.grad is not None and id(each) not in computed] if outputs else []
        alive = [tensor for ref, _ in outputs if (tensor := ref()) is not None]
        gone = sum(size for ref, size in outputs if ref() is None)
        matching = {id(each) for each in shards if any(_holds(each.grad, output) for output in alive)}
        rest = [each for each in shards if id(each) not in matching]
        if rest and sum(each.numel() for each in rest) == gone:
            matching |= set(map(id, rest))
        self.found |= matching


def _holds(gradient: torch.Tensor | None, output: torch.Tensor) -> bool:
    """True if a gradient is in the memory of an output, or has its values up to a factor."""
    own, whole = local(gradient).detach().reshape(-1), local(output).detach().reshape(-1)
    begin, size = whole.data_ptr(), whole.numel() * whole.element_size()
    if begin <= own.data_ptr() < begin + size:
        return True
    return own.numel() == whole.numel() and own.device == whole.device and similar(whole, own)
