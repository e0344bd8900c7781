"""`CommHooks`: gradients that a communication hook gets, compared with what it makes of them.

A hook of DDP that rounds its bucket and sends it in FP32 leaves no other trace: the dtype that is sent is FP32. Nor
does one that rounds what it has reduced: the gradients after the pass are compared with its bucket. A hook of FSDP2
changes gradients that were reduced.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mpguard.runtime.proof import samples, witness
from mpguard.runtime.proof.handoffs import Witness

if TYPE_CHECKING:
    import torch

WHEN = "in a communication hook of DDP, before the reduction"
AFTER = "in a communication hook of DDP, after the reduction"
IN_REDUCTION = "in an all-reduce hook of FSDP2"


@dataclasses.dataclass
class _Bucket:
    """What a hook got. buffer: its elements. places: the sampled ones. left: their values. parts: of each sampled
    parameter itself, the number of its samples, and its gradient in the bucket. ranks: by how many a hook divides.
    """

    buffer: torch.Tensor
    places: torch.Tensor
    left: torch.Tensor
    parts: list[tuple[torch.Tensor, int, torch.Tensor]]
    ranks: int


class CommHooks:
    """The bucket of the hook that runs, and those that were reduced in the pass. found: where witnesses are added."""

    def __init__(self, found: list[Witness]) -> None:
        self._found = found
        self._open: _Bucket | None = None
        self._reduced: list[_Bucket] = []

    @contextlib.contextmanager
    def during(self, bucket: Any, ranks: int) -> Iterator[None]:
        """Compare what is sent inside of the block with the gradients of a bucket. ranks: of the group of DDP."""
        self._open = None if samples.is_capturing() else samples.safely(_read, bucket, ranks)
        try:
            yield
        finally:
            self._open = None

    def around(self, hook: Callable[[torch.Tensor], None], parameter: int) -> Callable[[torch.Tensor], None]:
        """Return an all-reduce hook of FSDP2 whose changes of the gradients are compared.

        parameter: the id of the first one whose gradients it gets.
        """

        def compared(reduced: torch.Tensor) -> None:
            left = None if samples.is_capturing() else samples.safely(samples.sample, reduced)
            hook(reduced)
            if left is not None:
                samples.safely(self._compare_reduced, left.cpu(), reduced, parameter)

        return compared

    def _compare_reduced(self, left: torch.Tensor, reduced: torch.Tensor, parameter: int) -> None:
        found = samples.sample(reduced).cpu()
        fp32 = str(left.dtype) == str(found.dtype) == "torch.float32"
        if fp32 and not witness.same(left, found) and (match := witness.rounded(left, found)) is not None:
            self._found.append(Witness("gradients", IN_REDUCTION, parameter, match))

    def sends(self, tensors: Iterable[torch.Tensor]) -> None:
        """Compare tensors that a collective gets with the bucket: those in FP32 and of its size."""
        import torch

        known = self._open
        for sent in tensors if known is not None else ():
            if known is not None and sent.numel() == known.buffer.numel() and sent.dtype is torch.float32:
                self._open = None  # what the hook sends after it is no gradient of its own
                samples.safely(self._compare_sent, known, sent)
                if sent.data_ptr() == known.buffer.data_ptr():  # it will have what the reduction makes of it
                    self._reduced.append(known)
                return

    def pass_ended(self) -> None:
        """Compare the gradients after a backward pass with the buckets that were reduced in it."""
        reduced, self._reduced = self._reduced, []
        for known in reduced:
            samples.safely(self._compare_gradients, known)

    def _compare_sent(self, known: _Bucket, sent: torch.Tensor) -> None:
        self._compare(known, known.left, sent.detach().reshape(-1)[known.places], WHEN)

    def _compare_gradients(self, known: _Bucket) -> None:
        import torch

        found = [samples.sample(own.grad) for own, _, _ in known.parts if own.grad is not None]
        if len(found) == len(known.parts):
            self._compare(known, known.buffer[known.places], torch.cat(found), AFTER)

    def _compare(self, known: _Bucket, left: torch.Tensor, found: torch.Tensor, when: str) -> None:
        """Record a witness if elements of a bucket were rounded. left, found: the sampled ones before and after."""
        left, found = left.cpu(), found.cpu()
        if witness.same(left, found):
            return
        match = witness.rounded(left, found) or witness.rounded(left / known.ranks, found)
        if match is None:
            return
        number = match.number
        for parameter, count, gradient in known.parts:
            if number < count:
                place = tuple(samples.place(gradient, number))
                self._found.append(Witness("gradients", when, id(parameter), match, place))
                return
            number -= count


def _read(bucket: Any, ranks: int) -> _Bucket | None:
    """Return samples of the gradients in a bucket; None if it is not in FP32."""
    import torch

    buffer, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
    if buffer.dtype is not torch.float32 or not buffer.numel():
        return None
    places, parts = [], []
    for number in samples.choose(gradients):
        own = gradients[number]
        index = samples.index_of(tuple(own.shape), own.device)
        at = torch.full_like(index.flat, own.storage_offset() - buffer.storage_offset())
        for position, stride in zip(index.places, own.stride(), strict=True):
            at += position * stride
        places.append(at)
        parts.append((parameters[number], at.numel(), own.detach()))
    known, elements = torch.cat(places), buffer.detach()
    return _Bucket(elements, known, elements[known], parts, ranks)
