"""`StepRound`: the numbers of one step of all optimizers. `Part`: those that are copied from the device together."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpguard.watching.readout import HostOrDevice, Readout

if TYPE_CHECKING:
    import torch

#: What the tensors of a part are: a kind of number, and the names of its rows (none for a single number).
Keys = list[tuple[str, list[str]]]

#: Losses, and norms, that are kept of one step: a script may train without an optimizer of torch.
MOST_NUMBERS = 1024


@dataclasses.dataclass
class Fresh:
    """What has happened since the last step of any optimizer. losses: unscaled; clips: norms that clipping computed."""

    losses: deque[HostOrDevice] = dataclasses.field(default_factory=lambda: deque(maxlen=MOST_NUMBERS))
    clips: deque[torch.Tensor] = dataclasses.field(default_factory=lambda: deque(maxlen=MOST_NUMBERS))
    backwards: int = 0

    def numbers(self) -> tuple[list[HostOrDevice], Keys]:
        """Return the losses and norms, with their keys; each is taken once."""
        keys: Keys = [("loss", []) for _ in self.losses]
        tensors = [*self.losses, *self.clips]
        keys += [("clip", []) for _ in self.clips]
        self.losses.clear()
        self.clips.clear()
        return tensors, keys


class Part:
    """Numbers of a round that are copied from the device together."""

    def __init__(self, tensors: Sequence[HostOrDevice], keys: Keys) -> None:
        self.readout = Readout(tensors)
        self.examined = False
        self._keys = keys
        self._kinds = {key for key, _ in keys}

    def numbers(self, key: str) -> list[float]:
        """Return all numbers under a key, when they have arrived."""
        return [each for _, found in self._found(key) for each in found]

    def rows(self, key: str) -> dict[str, list[float]]:
        """Return the numbers under a key by name: one, or a row of them."""
        found: dict[str, list[float]] = {}
        for names, values in self._found(key):
            if names:
                width = len(values) // len(names)
                found |= {name: values[index * width : (index + 1) * width] for index, name in enumerate(names)}
        return found

    def _found(self, key: str) -> list[tuple[list[str], list[float]]]:
        """Return the names and the numbers of each tensor under a key. Most parts have none, and are not read then."""
        if key not in self._kinds:
            return []
        read = zip(self._keys, self.readout.values(), strict=True)
        return [(names, values) for (own, names), values in read if own == key]


@dataclasses.dataclass
class StepRound:
    """One step of all optimizers, with the backward passes before it.

    stepped: ids of the optimizers that have stepped. skipped: how many of these steps were skipped. scaled: True under
    a loss scale. engine_norm, engine_scale: what an engine has on the host. sharded: True if gradients here are a part
    of those of the model. ended: when the last optimizer had stepped. handled: NaN or Inf of it was reported.
    """

    step: int
    backwards: int = 0
    stepped: set[int] = dataclasses.field(default_factory=set)
    parts: list[Part] = dataclasses.field(default_factory=list)
    skipped: int = 0
    scaled: bool = False
    engine_norm: float | None = None
    engine_scale: float | None = None
    sharded: bool = False
    ended: float = 0.0
    ms: float | None = None
    handled: bool = False

    def arrived(self) -> bool:
        """True if all numbers can be read without waiting."""
        return all(part.readout.arrived() for part in self.parts)

    def wait(self) -> None:
        """Wait for all numbers."""
        for part in self.parts:
            part.readout.wait()

    def numbers(self, key: str) -> list[float]:
        """Return all numbers under a key."""
        return [each for part in self.parts for each in part.numbers(key)]

    def rows(self, key: str) -> dict[str, list[float]]:
        """Return the numbers under a key by name."""
        found: dict[str, list[float]] = {}
        for part in self.parts:
            found |= part.rows(key)
        return found

    @property
    def loss(self) -> float | None:
        """The sum of what the backward passes began from, which is what the gradients belong to."""
        losses = self.numbers("loss")
        return sum(losses) if losses else None

    @property
    def scale(self) -> float | None:
        """The loss scale; None without one."""
        scales = self.numbers("scale")
        return scales[-1] if scales else self.engine_scale

    @property
    def own_norm(self) -> float | None:
        """The norm of the gradients that this rank has."""
        norms = self.numbers("norm")
        if not norms:
            return None
        scales = self.numbers("grad_scale")  # a fused optimizer gets gradients that are still scaled
        return _norm(norms) / (scales[-1] if scales and scales[-1] else 1.0)

    @property
    def norm(self) -> float | None:
        """The norm of all gradients: of clipping, of the engine, or the own one; None if that is a part of it."""
        clips = self.numbers("clip")
        if clips:
            return _norm(clips)
        if self.engine_norm is not None:
            return self.engine_norm
        return None if self.sharded else self.own_norm


def _norm(values: list[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan if any(map(math.isnan, values)) else math.inf
    return math.sqrt(math.fsum(value * value for value in values))


def names_in(module: Any, prefix: str = "") -> dict[int, str]:
    """Return the names of the parameters of a model, by id."""
    from mpguard.nn.fp8.filters import plain_name

    return {id(own): plain_name(prefix + name) for name, own in module.named_parameters(remove_duplicate=False)}
