"""Reports the shares and the noise of FP8 layers, which `fp8_shares` has measured: of all ranks together, on rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mpguard.policy.policy import Policy
from mpguard.runtime.ranks import rank, world_size
from mpguard.watching import drift, suggest
from mpguard.watching.output import WatchEvent

#: Ranks whose numbers are read, the first ones: rank 0 reads a row for each tensor of each of them.
MOST_RANKS = 64

#: Steps between two looks for the numbers of other ranks.
READ_EVERY = 10

#: The names of a tensor's numbers: the largest value, and the shares of its values that become zero and saturate.
COLUMNS = ("amax", "underflow", "saturated")

#: The ratio, in dB, that stands for no noise at all.
EXACT = 150.0

#: Of a tensor ("layer: tensor") the `COLUMNS`; of a layer its output's noise and the bound, as parts of the energy.
Numbers = Mapping[str, list[float]]


class Fp8Report:
    """Writes what FP8 layers round, and reports layers with too much noise. emit: takes the events."""

    def __init__(self, emit: Callable[[WatchEvent], None]) -> None:
        self._emit = emit
        self._ranks = drift.RankReports("fp8/", first=MOST_RANKS)
        self._own: dict[int, Numbers] = {}  # of steps that other ranks have not all published yet
        self._reported: set[str] = set()
        self._last: tuple[int, Numbers] | None = None

    def add(self, step: int, numbers: Numbers, policy: Policy | None) -> None:
        """Add the numbers of this rank at a step, if there are any; and what other ranks have by now."""
        finite = {name: row for name, row in numbers.items() if all(map(math.isfinite, row))}
        if finite and world_size()[0] == 1:
            self._write(step, finite, 1, policy)
        elif finite and self._ranks.publish(step, finite) and rank() == 0:
            self._own[step] = finite
        if self._own and step % READ_EVERY == 0:
            self._read(policy)

    def _read(self, policy: Policy | None) -> None:
        for step, reports in self._ranks.complete():
            self._own.pop(step, None)
            self._write(step, together(reports), len(reports), policy)

    def _write(self, step: int, numbers: Numbers, ranks: int, policy: Policy | None) -> None:
        self._last = step, numbers
        tensors, noise = _parted(numbers)
        layers: dict[str, dict[str, Any]] = {}
        for name, row in noise.items():
            layers.setdefault(name, {})["snr"] = round(_decibels(row[0]), 2)
        for name, row in tensors.items():
            layer, _, tensor = name.partition(": ")
            layers.setdefault(layer, {})[tensor] = _named(row)
        worst = _named(max(column) for column in zip(*tensors.values(), strict=True)) if tensors else {}
        least = {"snr": min(own["snr"] for own in layers.values() if "snr" in own)} if noise else {}
        value = {**least, **worst, "ranks": ranks, "layers": layers}
        self._emit(WatchEvent("fp8_statistics", step, None, value))
        self._report_noise(step, noise, tensors, policy)

    def _report_noise(self, step: int, noise: Numbers, tensors: Numbers, policy: Policy | None) -> None:
        """Report layers whose output has more noise than the bound, each once."""
        above = {name: row for name, row in noise.items() if row[0] > row[1] and name not in self._reported}
        if not above:
            return
        self._reported.update(above)
        layer = max(above, key=lambda name: above[name][0])
        found, bound = (_decibels(each) for each in above[layer])
        zeros = {name: tensors.get(f"{layer}: {name}", [0.0, 0.0])[1] for name in ("input", "weight")}
        tensor = max(zeros, key=lambda name: zeros[name])
        text = f"the output of `{layer}` keeps {found:.1f} dB in FP8, less than {bound:g}"
        text += f": {zeros[tensor]:.0%} of its {tensor} become zero" if zeros[tensor] >= 0.01 else ""
        text += f"; and {len(above) - 1} other layers" if len(above) > 1 else ""
        ratios = {name: round(_decibels(row[0]), 2) for name, row in list(above.items())[:16]}
        value = {"snr": ratios, "bound": bound, "layers": len(above)}
        self._emit(WatchEvent("fp8_noise", step, layer, value, suggest.for_fp8_noise(layer, policy), text))

    def finish(self, policy: Policy | None) -> str:
        """Report what is left, and return a line about the last step; empty without one.

        Where other ranks have not published yet, the own numbers are reported alone.
        """
        self._read(policy)
        for step, rows in sorted(self._own.items()):
            self._write(step, rows, 1, policy)
        self._own.clear()
        if self._last is None:
            return ""
        step, numbers = self._last
        tensors, noise = _parted(numbers)
        parts = [_most(tensors, 1, "become zero"), _most(tensors, 2, "saturate")] if tensors else []
        if noise:
            layer = max(noise, key=lambda name: noise[name][0])
            parts.insert(0, f"outputs keep at least {_decibels(noise[layer][0]):.1f} dB (`{layer}`)")
        layers = len({name.partition(": ")[0] for name in numbers})
        return f"FP8 at step {step}, {layers} layer{'s' * (layers > 1)}: {'; '.join(parts)}"


def together(reports: Iterable[Numbers]) -> dict[str, list[float]]:
    """Return the numbers of all ranks: the largest values, and the means of the others, of the ranks that have them."""
    found: dict[str, list[list[float]]] = {}
    for report in reports:
        for name, row in report.items():
            found.setdefault(name, []).append(row)
    means = {
        name: [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)] for name, rows in found.items()
    }
    return {
        name: [max(row[0] for row in found[name]), *row[1:]] if len(row) == len(COLUMNS) else row
        for name, row in means.items()
    }


def _parted(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Return the numbers of tensors, and those of layers."""
    tensors = {name: row for name, row in numbers.items() if len(row) == len(COLUMNS)}
    return tensors, {name: row for name, row in numbers.items() if name not in tensors}


def _decibels(noise: float) -> float:
    return EXACT if noise <= 0 else min(EXACT, -10 * math.log10(noise))


def _named(row: Iterable[float]) -> dict[str, float]:
    return {name: float(f"{each:.4g}") for name, each in zip(COLUMNS, row, strict=True)}


def _most(tensors: Numbers, column: int, verb: str) -> str:
    name = max(tensors, key=lambda each: tensors[each][column])
    share = tensors[name][column]
    if not share:
        return f"no values {verb}"
    layer, _, tensor = name.partition(": ")
    return f"at most {f'{share:.2%}' if share >= 0.0001 else 'less than 0.01%'} {verb} (the {tensor} of `{layer}`)"
