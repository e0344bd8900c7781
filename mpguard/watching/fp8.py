"""Largest values and scales of Transformer Engine's delayed scaling.

It scales a tensor by the largest values of earlier steps, so that larger values are clipped: they saturate. Other FP8
scaling (current, block, MXFP8, torchao's) takes the tensor's own values: nothing saturates, and there is no state.

During a step Transformer Engine adds the largest value of each tensor to its history, and computes the next scale. So
the scales are kept at the end of one step, and multiplied with what the next has added. Nothing of Transformer Engine
is replaced, and nothing waits for the GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

#: What the columns of a history are, for each matmul of a module; unused ones stay 0.
COLUMNS = {
    "scaling_fwd": ("input", "weight", "output"),
    "scaling_bwd": ("gradient of the output", "gradient of the input"),
}


@dataclasses.dataclass(frozen=True)
class ScaledTensors:
    """The tensors of a module that are scaled together. state: of Transformer Engine. largest: of their FP8 format."""

    names: tuple[str, ...]
    state: Any
    largest: float

    def newest(self, passes: int) -> torch.Tensor | None:
        """Return the largest values of the first of the last passes; None if the history does not have it any more."""
        history = self.state.amax_history
        if len(history) > passes:
            return history[-passes]  # type: ignore[no-any-return]
        if len(history) == 1 and passes == 1:  # it is erased, but the scale has been computed from it alone
            return self.largest / 2**self.state.recipe.margin / self.state.scale  # type: ignore[no-any-return]
        return None


def scaled_tensors(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[ScaledTensors]:
    """Yield what modules of Transformer Engine scale by a history; nothing for other modules and other scaling."""
    for name, module in modules:
        states = getattr(module, "fp8_meta", None)
        if not isinstance(states, dict):
            continue
        for way, columns in COLUMNS.items():
            state: Any = states.get(way)
            if hasattr(state, "amax_history"):
                formats = state.recipe.fp8_format.value
                largest = formats.max_fwd if way == "scaling_fwd" else formats.max_bwd
                count = state.amax_history.shape[1]
                names = tuple(f"{name}: {columns[column % len(columns)]}" for column in range(count))
                yield ScaledTensors(names, state, float(largest))


class DelayedScales:
    """The scales that a step computes with, kept from the step before: by the largest value of a format."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, list[ScaledTensors], torch.Tensor]] = []

    def keep(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Keep the scales of modules: those that the next step computes with."""
        import torch

        by_format: dict[float, list[ScaledTensors]] = {}
        for each in scaled_tensors(modules):
            by_format.setdefault(each.largest, []).append(each)
        self._kept = [
            (largest, found, torch.cat([each.state.scale for each in found])) for largest, found in by_format.items()
        ]

    def look(self, passes: int) -> list[tuple[list[str], torch.Tensor]]:
        """Return names, and for each its largest value over what its scale allows, and that value itself.

        passes: passes of the step, each of which has added to the history.
        """
        import torch

        tables = []
        for largest, found, scales in self._kept:
            newest = [value for each in found if (value := each.newest(passes)) is not None]
            if len(newest) == len(found):
                values = torch.cat(newest)
                names = [name for each in found for name in each.names]
                tables.append((names, torch.stack([values * scales / largest, values], 1)))
        self._kept = []
        return tables
