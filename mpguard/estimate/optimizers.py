"""What an optimizer keeps for each parameter, and what it needs while it steps.

The step counters are not counted: they are on the CPU. `adamw-fused` is torch's AdamW(fused=True), the default of the
Trainer, which updates each element in one kernel; `adamw-bf16` is one like it with BF16 states. `adamw8bit` is
torchao's or bitsandbytes'; `muon` is torch.optim.Muon for weights of Linear layers and AdamW for the rest; `sgd` has
momentum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from mpguard.estimate.tape import FULL, HALF
from mpguard.estimate.weights import Kind


@dataclasses.dataclass(frozen=True)
class Owned:
    """A tensor that the optimizer of one rank updates. width: bytes of an element."""

    shape: tuple[int, ...]
    width: int
    kind: Kind

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """state: bytes that stay for a tensor. step: bytes that all tensors need while the optimizer steps."""

    name: str
    state: Callable[[Owned], int]
    step: Callable[[Sequence[Owned]], int]


def _twice(tensor: Owned) -> int:
    return 2 * tensor.count * tensor.width


def _once(tensor: Owned) -> int:
    return tensor.count * tensor.width


#: Elements that share a scale in 8-bit states; smaller tensors stay as they are.
_BLOCK, _SMALLEST = 256, 4096


def _eight_bit(tensor: Owned) -> int:
    if tensor.count < _SMALLEST or tensor.count % _BLOCK:
        return _twice(tensor)
    return 2 * (tensor.count + tensor.count // _BLOCK * FULL)


def _adafactor(tensor: Owned) -> int:
    """A row and a column of second moments for matrices; one for each element of vectors."""
    if len(tensor.shape) < 2:
        return _once(tensor)
    *outer, rows, columns = tensor.shape
    return math.prod(outer) * (rows + columns) * tensor.width


def _muon(tensor: Owned) -> int:
    return _once(tensor) if tensor.kind == "linear" and len(tensor.shape) == 2 else _twice(tensor)


def _sum(tensors: Sequence[Owned]) -> int:
    return sum(each.count * each.width for each in tensors)


def _largest(tensors: Sequence[Owned]) -> int:
    return max((each.count * each.width for each in tensors), default=0)


def _muon_step(tensors: Sequence[Owned]) -> int:
    """AdamW's for what is no matrix; Newton-Schulz of one matrix in BF16 otherwise."""
    others = [each for each in tensors if _muon(each) != _once(each)]
    return max(_sum(others), 3 * _largest([each for each in tensors if each not in others]))


#: AdamW steps on all tensors together (`foreach`, the default on GPUs): the roots of all second moments exist at once.
OPTIMIZERS: Mapping[str, Optimizer] = {
    each.name: each
    for each in (
        Optimizer("adamw", _twice, _sum),
        Optimizer("adamw-fused", _twice, lambda _: 0),
        Optimizer("adamw-bf16", lambda tensor: 2 * tensor.count * HALF, lambda _: 0),
        Optimizer("adamw8bit", _eight_bit, lambda tensors: 3 * _largest(tensors)),
        Optimizer("lion", _once, _largest),
        Optimizer("sgd", _once, lambda _: 0),
        Optimizer("muon", _muon, _muon_step),
        Optimizer("adafactor", _adafactor, lambda tensors: 2 * _largest(tensors)),
    )
}
