"""`Shards`: gradients that hold what the script's own reductions have left, as a step finds them.

The script may add up gradients in buffers of its own, reduce these, and give them back as gradients, or give an
optimizer its part of them. A parameter that is a part of a flat copy of the model (ZeRO by hand) has a gradient that
differs between ranks, and is reduced all the same.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from mpguard.runtime.proof.collectives import Collective
from mpguard.runtime.proof.gradients import Gradients, similar
from mpguard.runtime.proof.products import short
from mpguard.runtime.proof.samples import local
from mpguard.runtime.ranks import world_size

if TYPE_CHECKING:
    import torch

#: Tensors that are kept between two steps.
MOST = 4096


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A tensor that a reduction of the script fills; it may not be filled yet. scattered: this rank gets a part."""

    tensor: weakref.ref[torch.Tensor]
    size: int
    dtype: str
    group: str
    scattered: bool


class Shards:
    """The results of reductions of the script, and the gradients that hold them.

    found: ids of the parameters whose gradients hold a part of a result, at the beginning of a step.
    """

    def __init__(self) -> None:
        self.found: set[int] = set()
        self._results: list[_Sum] = []
        #: Those of reductions of tensors that were not known to hold gradients.
        self._unknown: list[_Sum] = []
        #: This rank's parts of what functions of autograd have reduced and scattered, with the elements that were sent.
        self._scattered: list[tuple[_Sum, int]] = []
        self._stepped = False

    def record(self, call: Collective, *, known: bool) -> None:
        """Record the results of a call. known: True if it was found to have gradients."""
        self._forget_last_step()
        made = [
            _Sum(weakref.ref(each), each.numel(), short(each.dtype), call.group, bool(call.outputs))
            for each in call.outputs or call.tensors
        ]
        self._results = (self._results + made)[-MOST:]
        if not known and not call.outputs:
            self._unknown = (self._unknown + made)[-MOST:]

    def record_scattered(self, call: Collective) -> None:
        """Record a reduce-scatter of a function of autograd: of the gradients of a weight that it has gathered, or of
        activations."""
        self._forget_last_step()
        sent = sum(each.numel() for each in call.tensors) // len(call.outputs)
        made = [
            (_Sum(weakref.ref(each), each.numel(), short(each.dtype), call.group, scattered=True), sent)
            for each in call.outputs
        ]
        self._scattered = (self._scattered + made)[-MOST:]

    def _forget_last_step(self) -> None:
        if self._stepped:
            self._stepped, self._results, self._unknown, self._scattered = False, [], [], []

    def begin_step(self, parameters: Iterable[torch.Tensor], gradients: Gradients) -> None:
        """Find the parameters whose gradients are results, or were made of them up to a factor."""
        self._stepped = True
        own = [each for each in parameters if each.grad is not None]
        if self._unknown:
            self._find_whole(own, gradients)
        if self._results and (gradients.reduced or gradients.in_hooks):
            self._find_parts(own, gradients.leaves)
        if self._scattered:
            self._find_gathered(own, gradients)

    def _find_whole(self, own: list[torch.Tensor], gradients: Gradients) -> None:
        """Find gradients that are results as a whole.

        A result that no longer exists, or was overwritten, counts by its size, if the gradients of a whole optimizer
        are explained so: ranks compare that these are the same everywhere.
        """
        rest = []
        for each in self._unknown:
            tensor = each.tensor()
            owners = gradients.owners(tensor, gradients.reduced)[0] if tensor is not None else []
            if owners:
                gradients.add_sent(owners, each.dtype, each.size, each.group)
            else:
                rest.append(each)
        missing = [each for each in own if id(each) in gradients.leaves and id(each) not in gradients.reduced]
        explaining = _of_size(rest, [local(each).numel() for each in missing])
        for each in explaining:
            gradients.add_sent(missing, each.dtype, each.size, each.group)
        self._unknown = [each for each in rest if each not in explaining]

    def _find_gathered(self, own: list[torch.Tensor], gradients: Gradients) -> None:
        """Find parts of weights that functions of autograd gather, and whose gradients they reduce and scatter.

        They are those that nothing else reduces, if what was scattered has exactly their sizes, once for each pass.
        """
        known = gradients.reduced | self.found
        rest = [each for each in own if id(each) in gradients.leaves and id(each) not in known]
        sizes = Counter(local(each).numel() for each in rest)
        scattered = Counter(each.size for each, _ in self._scattered)
        passes = scattered.total() // max(1, sizes.total())
        if rest and scattered == Counter({size: count * passes for size, count in sizes.items()}):
            self.found |= set(map(id, rest))
            for each, sent in self._scattered:
                gradients.add_sent(rest, each.dtype, sent, each.group)

    def _find_parts(self, own: list[torch.Tensor], computed: Collection[int]) -> None:
        """Find gradients that are parts of results. computed: ids of tensors that backward passes have reached."""
        shards = [each for each in own if id(each) not in computed]
        alive = [tensor for each in self._results if (tensor := each.tensor()) is not None]
        matching = {id(each) for each in shards if any(_holds(each.grad, tensor) for tensor in alive)}
        rest = sum(each.numel() for each in shards if id(each) not in matching)
        gone = [each for each in self._results if each.tensor() is None]
        scattered = sum(each.size for each in gone if each.scattered)
        whole = sum(each.size for each in gone if not each.scattered)
        if rest and (rest == scattered or rest * world_size()[0] == whole):
            matching |= set(map(id, shards))
            self._results = [each for each in self._results if each not in gone]
        self.found |= matching


def _of_size(results: list[_Sum], sizes: list[int]) -> list[_Sum]:
    """Return results that have the sizes of gradients: one of all, one of each, or all together; else none.

    Collectives of single elements are not recorded.
    """
    total = sum(sizes)
    if whole := [each for each in results if each.size == total][:1]:
        return whole if sizes else []
    available = {size: [each for each in results if each.size == size] for size in set(sizes) - {1}}
    needed = Counter(size for size in sizes if size > 1)
    if needed and all(len(available[size]) >= count for size, count in needed.items()):
        return [each for size, count in needed.items() for each in available[size][:count]]
    return results if sizes and sum(each.size for each in results) == total else []


def _holds(gradient: torch.Tensor | None, result: torch.Tensor) -> bool:
    """True if a gradient is in the memory of a result, or has the values of a part of it up to a factor."""
    own, whole = local(gradient).detach().reshape(-1), local(result).detach().reshape(-1)
    begin, size = whole.data_ptr(), whole.numel() * whole.element_size()
    if begin <= own.data_ptr() < begin + size:
        return True
    if own.device != whole.device or own.numel() > whole.numel():
        return False
    parts = whole.split(own.numel())[: world_size()[0]]
    return any(part.numel() == own.numel() and similar(part, own) for part in parts)
