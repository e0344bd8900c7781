"""What checkpoints save and load: in which dtypes, and the amax history of delayed scaling.

`Loaded` reports the dtypes at the first step after a checkpoint was loaded. The formats of accelerate and the Trainer
have no place for the amax history, so it is in files of its own in the checkpoint's folder: one per rank, as accelerate
does for random states, because with `reduce_amax=False` each rank has its own scales.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpguard.nn.fp8.filters import plain_name
from mpguard.policy.dtype import Dtype
from mpguard.runtime.proof.products import short
from mpguard.runtime.ranks import rank

if TYPE_CHECKING:
    from torch import nn


def _path(folder: str | Path, number: int) -> Path:
    return Path(folder, f"mpguard_fp8_{number}.bin")


def save(models: Iterable[nn.Module], folder: str | Path) -> None:
    """Write the amax history of the models' layers; write nothing if no layer has one."""
    import torch

    from mpguard.nn.fp8.amax_history import fp8_state_dict

    states = [fp8_state_dict(model) for model in models]
    if any(states):
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(states, _path(folder, rank()))


def load(models: Iterable[nn.Module], folder: str | Path) -> None:
    """Restore the amax history if the checkpoint has one. Ranks without a file of their own use that of rank 0.

    Not strict: a policy may have more layers in FP8 than the checkpoint; those start with an empty history, and that is
    logged.
    """
    import torch

    from mpguard.nn.fp8.amax_history import layers_of, load_fp8_state_dict

    models = list(models)
    path = next((path for number in (rank(), 0) if (path := _path(folder, number)).is_file()), None)
    if path is None or not any(map(layers_of, models)):
        return
    states: list[Any] = torch.load(path, map_location="cpu", weights_only=True)
    for model, state in zip(models, states, strict=False):
        load_fp8_state_dict(model, state, strict=False)


# -- dtypes --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Load:
    """What was loaded at once. what: `weights`, or `states of AdamW`. saved, now: elements by dtype."""

    what: str
    saved: Counter[str]
    now: Counter[str]

    def __str__(self) -> str:
        saved, now = " and ".join(sorted(self.saved)), " and ".join(sorted(self.now))
        if self.saved.keys() == self.now.keys():
            return f"mpguard: resumed: {self.what} saved and loaded in {saved}"
        lost = "; the digits that they had are lost" if _width(self.now) < _width(self.saved) else ""
        return f"mpguard: resumed: {self.what} saved in {saved}, loaded into {now}{lost}"

    @property
    def narrower(self) -> str:
        """The dtype in which most was saved, if it is in a wider one now; else nothing."""
        return self.saved.most_common(1)[0][0] if 0 < _width(self.saved) < _width(self.now) else ""


class Loaded:
    """What a process has loaded from checkpoints since its last applied step."""

    def __init__(self) -> None:
        self._weights: dict[int, Load] = {}  # by the id of the module: what it has loaded last
        self._states: list[Load] = []
        self._scale: float | None = None

    def weights(self, module: nn.Module, saved: Mapping[str, Any]) -> None:
        """Record the weights that a module has loaded from a `state_dict`."""
        plain = {plain_name(name): each for name, each in saved.items()}
        own = [(plain_name(name), each) for name, each in (*module.named_parameters(), *module.named_buffers())]
        pairs = [(plain[name], each) for name, each in own if name in plain]
        load = Load("weights", _counted(each for each, _ in pairs), _counted(each for _, each in pairs))
        self._weights.pop(id(module), None)
        self._weights[id(module)] = load

    def states(self, optimizer: Any, saved: Mapping[str, Any]) -> None:
        """Record the states that an optimizer has loaded from a `state_dict`; torch casts them to its parameters'."""
        before = [each for state in saved.get("state", {}).values() for each in _leaves(state)]
        after = [each for state in optimizer.state.values() for each in _leaves(state)]
        self._states.append(Load(f"states of {type(optimizer).__name__}", _counted(before), _counted(after)))

    def scaler(self, scale: float) -> None:
        """Record that a GradScaler has loaded its state."""
        self._scale = scale

    def narrower(self, module: nn.Module) -> str:
        """Return the dtype in which the weights of a module were saved, if they are in a wider one; else nothing."""
        load = self._weights.get(id(module))
        return load.narrower if load is not None else ""

    @property
    def narrower_states(self) -> str:
        """The dtype in which the states were saved that were loaded last, if they are in a wider one; else nothing."""
        return self._states[-1].narrower if self._states else ""

    def report(self, scaler: Mapping[str, Any] | None) -> list[str]:
        """Return what to print at the first step afterwards, and forget it.

        scaler: facts about the GradScaler of the optimizer; None without one, and for DeepSpeed's, which is part of the
        optimizer's state. Weights alone, such as pretrained ones, are reported if they were saved in a lower dtype.
        """
        loads = [each for each in (*self._weights.values(), *self._states) if each.saved and each.now]
        if not self._states:
            loads = [each for each in loads if _width(each.saved) < _width(each.now)]
        lines = [str(each) for each in loads]
        if self._states and scaler is not None and scaler["enabled"]:
            missing = "mpguard: resumed: no state of the GradScaler was loaded: its scale starts again, and the first "
            missing += "steps may be skipped. Save `scaler.state_dict()` with the checkpoint, and load it"
            lines.append(
                missing if self._scale is None else f"mpguard: resumed: GradScaler loaded, scale {self._scale:g}"
            )
        self._weights, self._states, self._scale = {}, [], None
        return list(dict.fromkeys(lines))


def _leaves(state: Any) -> list[Any]:
    from torch.utils._pytree import tree_leaves

    return list(tree_leaves(dict(state) if isinstance(state, Mapping) else state))


def _counted(tensors: Iterable[Any]) -> Counter[str]:
    """Count the elements of floating-point tensors by dtype; step counters and flags are left out."""
    import torch

    counts: Counter[str] = Counter()
    for each in tensors:
        if isinstance(each, torch.Tensor) and each.is_floating_point() and each.numel() > 1:
            counts[short(each.dtype)] += each.numel()
    return counts


def _width(counts: Counter[str]) -> int:
    """Return the number of bits of the dtype that most elements have; 0 for one that a policy does not have."""
    known = Dtype.spelled(counts.most_common(1)[0][0]) if counts else None
    return known.bits if known else 0
