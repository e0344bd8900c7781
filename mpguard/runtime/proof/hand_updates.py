"""`HandUpdates`: trained parameters that no optimizer has, and whose values the script changes between backward passes.

A gradient alone shows nothing: it may be thrown away. What counts are values that were read before a pass, and are
others before a later one.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from mpguard.runtime.proof.samples import is_allocated, safely, sample

if TYPE_CHECKING:
    import torch

#: Parameters that are sampled, and values that a parameter must have to show in which dtype it is kept.
MOST, VALUES = 32, 64


@dataclasses.dataclass
class _Known:
    """A parameter. values: its sample at the last pass. rounded: the dtype in which all values were exact then."""

    parameter: weakref.ref[torch.Tensor]
    values: torch.Tensor
    changes: int = 0
    rounded: str = ""


class HandUpdates:
    """The parameters outside of all optimizers that backward passes reach, by their ids."""

    def __init__(self, previous: HandUpdates | None = None) -> None:
        self._known: dict[int, _Known] = {} if previous is None else previous._known

    def forget(self) -> None:
        """Forget all values: a checkpoint was loaded."""
        self._known.clear()

    def record_pass(self, leaves: Collection[torch.Tensor], optimizers: Iterable[Any]) -> None:
        """Compare the values of parameters with those at the last pass. leaves: those that the pass reaches."""
        safely(self._record, leaves, optimizers)

    def _record(self, leaves: Collection[torch.Tensor], optimizers: Iterable[Any]) -> None:
        import torch

        own = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
        if not own & {id(leaf) for leaf in leaves}:
            return  # there is no optimizer, or it has copies: masters, or flat parameters of an engine
        others = [
            leaf for leaf in leaves
            if id(leaf) not in own and leaf.dtype is torch.float32 and isinstance(leaf, torch.nn.Parameter)
            and leaf.numel() >= VALUES and is_allocated(leaf) and type(leaf.data) is torch.Tensor
        ]  # fmt: skip
        for leaf in others[:MOST]:
            now, known = sample(leaf), self._known.get(id(leaf))
            if known is None or known.parameter() is not leaf:
                self._known[id(leaf)] = _Known(weakref.ref(leaf), now, rounded=_exact_in(leaf))
            elif known.values.shape == now.shape and not torch.equal(known.values, now):
                known.values, known.changes = now, known.changes + 1
                known.rounded = _exact_in(leaf)

    def found(self, names: dict[int, str]) -> dict[str, list[str]]:
        """Return the parameters that were changed twice or more, by `fp32` or the 16-bit dtype of all their values.

        names: of parameters, by id; others are named by their shape.
        """
        result: dict[str, list[str]] = {}
        for number, known in self._known.items():
            parameter = known.parameter()
            if parameter is not None and known.changes > 1:
                shape = " x ".join(map(str, parameter.shape))
                result.setdefault(known.rounded or "fp32", []).append(names.get(number, f"a parameter of {shape}"))
        return result


def _exact_in(parameter: torch.Tensor) -> str:
    """Return the 16-bit dtype that has all values of a parameter, and at least `VALUES` different ones; or ""."""
    import torch

    values: Any = parameter.detach().reshape(-1)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if torch.equal(values.to(dtype).float(), values):
            return name if values.unique().numel() >= VALUES // 2 else ""
    return ""
