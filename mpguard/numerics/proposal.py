"""A recipe per layer that keeps the worst loss under a bound: `fp8_modules`, and what it costs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from mpguard.numerics.layers import MeasuredLayer, share_of

#: The finer recipes that the same library has, which a layer gets instead of none.
FINER: Mapping[str, tuple[str, ...]] = {"tensorwise": ("rowwise",)}

#: The recipe of a layer that stays in the compute dtype. Not "off", which YAML reads as a boolean.
NONE = "none"


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A recipe for each layer that may be FP8.

    bound: in dB. modules: the entries of `fp8_modules`. choices: recipe of each layer. share: of the FP8 matmuls that
    are left. worst: the lowest ratio of a layer that stays in FP8; None if none does.
    """

    bound: float
    modules: tuple[Mapping[str, str], ...]
    choices: Mapping[str, str]
    share: float
    worst: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the proposal as plain data."""
        return {
            "bound": self.bound,
            "fp8_modules": [dict(each) for each in self.modules],
            "share": self.share,
            "worst": self.worst,
        }


def propose(layers: Sequence[MeasuredLayer], recipe: str, bound: float, finer: Sequence[str]) -> Proposal:
    """Return the proposal for the layers of a run. finer: recipes that a layer may have instead, the cheapest first.

    A layer that was not measured keeps its recipe: nothing is known of it.
    """
    fit = [layer for layer in layers if not layer.left_out]
    choices = {layer.name: _choice(layer, recipe, bound, finer) for layer in fit}
    left = [layer for layer in fit if choices[layer.name] != NONE]
    ratios = [snr for layer in left if (snr := layer.snr(choices[layer.name])) is not None]
    changed = {name: chosen for name, chosen in choices.items() if chosen != recipe}
    modules = _entries(changed, choices, [layer.name for layer in layers])
    return Proposal(bound, modules, choices, share_of(left, layers), min(ratios, default=None))


def _choice(layer: MeasuredLayer, recipe: str, bound: float, finer: Iterable[str]) -> str:
    found = layer.snr(recipe)
    if found is None or found >= bound:
        return recipe
    return next((each for each in finer if (snr := layer.snr(each)) is not None and snr >= bound), NONE)


def _entries(
    changed: Mapping[str, str], choices: Mapping[str, str], names: Sequence[str]
) -> tuple[Mapping[str, str], ...]:
    """Return the entries that give each changed layer its recipe, and no other layer another one.

    One pattern stands for layers that differ in numbers only (`blocks.*.down`), if all that it matches are changed so.
    """
    entries: list[Mapping[str, str]] = []
    covered: set[str] = set()
    for name, recipe in changed.items():
        if name in covered:
            continue
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        matched = [each for each in names if fnmatchcase(each, pattern)]
        if "[" in name or any(choices.get(each) != recipe for each in matched) or len(matched) < 2:
            pattern, matched = name, [name]
        covered.update(matched)
        entries.append({"pattern": pattern, "recipe": recipe})
    return tuple(entries)
