"""The history of delayed scaling beside checkpoints of accelerate and the Trainer, whose formats have no place for it.

One file per rank, as accelerate has them for random states: with `reduce_amax=False` each rank has scales of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpguard.runtime.proof.consensus import rank

if TYPE_CHECKING:
    from torch import nn


def _file(folder: str | Path, number: int) -> Path:
    return Path(folder, f"mpguard_fp8_{number}.bin")


def save(models: Iterable[nn.Module], folder: str | Path) -> None:
    """Writes what the models' layers remember; nothing where none does."""
    import torch

    from mpguard.nn.fp8.amax_history import fp8_state_dict

    states = [fp8_state_dict(model) for model in models]
    if any(states):
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(states, _file(folder, rank()))


def load(models: Iterable[nn.Module], folder: str | Path) -> None:
    """Gives it back, where the checkpoint has it; on more ranks than there were, that of the first.

    A policy that has more layers in FP8 than the checkpoint's is none's mistake: those begin anew, which is said.
    """
    import torch

    from mpguard.nn.fp8.amax_history import layers_of, load_fp8_state_dict

    models = list(models)
    path = next((path for number in (rank(), 0) if (path := _file(folder, number)).is_file()), None)
    if path is None or not any(map(layers_of, models)):
        return
    states: list[Any] = torch.load(path, map_location="cpu", weights_only=True)
    for model, state in zip(models, states, strict=False):
        load_fp8_state_dict(model, state, strict=False)
