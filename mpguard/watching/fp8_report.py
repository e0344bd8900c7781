"""Reports the shares of FP8 layers, which `fp8_shares` has counted: those of all ranks together, on rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mpguard.policy.policy import Policy
from mpguard.runtime.ranks import rank, world_size
from mpguard.watching import drift, suggest
from mpguard.watching.output import WatchEvent

#: The share of a tensor's values that become zero from which it is an event. Of normally distributed values this share
#: becomes zero when their noise is 20 dB below them, the bound of `mpguard sensitivity`: spaced evenly by s, values
#: below s / 2 become zero, and the noise is s / sqrt(12); 20 dB is s = 0.346 deviations, and 14 % are below half of it.
FP8_UNDERFLOW_SHARE = 0.14

#: Ranks whose shares are read, the first ones: rank 0 reads a row for each tensor of each of them.
MOST_RANKS = 64

#: Steps between two looks for the shares of other ranks.
READ_EVERY = 10

#: The largest value of a tensor, and the shares of its values that underflow and saturate.
TensorShares = list[float]


class Fp8Report:
    """Writes what FP8 layers round, and reports tensors of which too much underflows. emit: takes the events."""

    def __init__(self, emit: Callable[[WatchEvent], None]) -> None:
        self._emit = emit
        self._ranks = drift.RankReports("fp8/", first=MOST_RANKS)
        self._own: dict[int, dict[str, TensorShares]] = {}  # of steps that other ranks have not all published yet
        self._reported: set[str] = set()
        self._last: tuple[int, dict[str, TensorShares]] | None = None

    def add(self, step: int, rows: Mapping[str, TensorShares], policy: Policy | None) -> None:
        """Add the rows of this rank at a step, if there are any; and what other ranks have by now."""
        finite = {name: row for name, row in rows.items() if all(map(math.isfinite, row))}
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

    def _write(self, step: int, rows: dict[str, TensorShares], ranks: int, policy: Policy | None) -> None:
        self._last = step, rows
        layers: dict[str, dict[str, Any]] = {}
        for name, row in rows.items():
            layer, _, tensor = name.partition(": ")
            layers.setdefault(layer, {})[tensor] = _named(row)
        value = {**_named([max(column) for column in zip(*rows.values(), strict=True)]), "ranks": ranks}
        self._emit(WatchEvent("fp8_statistics", step, None, {**value, "layers": layers}))
        above = {name: row[1] for name, row in rows.items() if row[1] > FP8_UNDERFLOW_SHARE}
        fresh = sorted(above.keys() - self._reported, key=lambda name: -above[name])
        if fresh:
            self._reported.update(fresh)
            layer, _, tensor = fresh[0].partition(": ")
            more = f", and more than {FP8_UNDERFLOW_SHARE:.0%} of {len(fresh) - 1} other tensors" if fresh[1:] else ""
            text = f"{above[fresh[0]]:.0%} of the {tensor} of `{layer}` become zero in FP8{more}"
            shares = {name: round(above[name], 4) for name in fresh[:16]}
            event = {"shares": shares, "bound": FP8_UNDERFLOW_SHARE, "tensors": len(fresh)}
            self._emit(WatchEvent("fp8_underflow", step, layer, event, suggest.for_fp8_underflow(layer, policy), text))

    def finish(self, policy: Policy | None) -> str:
        """Report what is left, and return a line about the last step; empty without one.

        Where other ranks have not published yet, the own rows are reported alone.
        """
        self._read(policy)
        for step, rows in sorted(self._own.items()):
            self._write(step, rows, 1, policy)
        self._own.clear()
        if self._last is None:
            return ""
        step, rows = self._last
        layers = len({name.partition(": ")[0] for name in rows})
        parts = [_most(rows, 1, "underflow"), _most(rows, 2, "saturate")]
        return f"FP8 at step {step}, {layers} layer{'s' * (layers > 1)}: {'; '.join(parts)}"


def together(reports: Iterable[Mapping[str, TensorShares]]) -> dict[str, TensorShares]:
    """Return the rows of all ranks: the largest values, and the mean shares of the ranks that have the tensor."""
    found: dict[str, list[TensorShares]] = {}
    for report in reports:
        for name, row in report.items():
            found.setdefault(name, []).append(row)
    return {
        name: [max(row[0] for row in rows), *(math.fsum(row[i] for row in rows) / len(rows) for i in (1, 2))]
        for name, rows in found.items()
    }


def _named(row: Iterable[float]) -> dict[str, float]:
    return {name: float(f"{each:.4g}") for name, each in zip(("amax", "underflow", "saturated"), row, strict=True)}


def _most(rows: Mapping[str, TensorShares], column: int, verb: str) -> str:
    name = max(rows, key=lambda each: rows[each][column])
    share = rows[name][column]
    if not share:
        return f"no values {verb}"
    layer, _, tensor = name.partition(": ")
    return f"at most {f'{share:.2%}' if share >= 0.0001 else 'less than 0.01%'} {verb} (the {tensor} of `{layer}`)"
