"""Compares ranks, through the store of the process group: no collective, and no rank waits for another."""

from __future__ import annotations

import json
import math
from typing import Any

from mpguard.runtime.proof import consensus
from mpguard.runtime.ranks import rank, world_size

#: Steps between two comparisons.
COMPARE_EVERY = 50

#: More ranks than this are not compared: rank 0 reads one value of each.
MOST_RANKS = 1024


class RankReports:
    """What each rank has published, and how far rank 0 has read it.

    kind: a part of the keys. first: only so many ranks publish, the first ones; by default all, if they are not too
    many to be read.
    """

    def __init__(self, kind: str = "", first: int | None = None) -> None:
        self._kind, self._first = kind, first
        self._open: list[int] = []  # steps that rank 0 has not compared yet

    def _ranks(self) -> int:
        ranks = world_size()[0]
        return ranks if self._first is None else min(ranks, self._first)

    def _key(self, step: int, number: int) -> str:
        return f"mpguard/watch/{self._kind}{step}/{number}"

    def publish(self, step: int, facts: dict[str, Any]) -> bool:
        """Publish the facts of this rank at a step, if there are several ranks and a store. True if it did."""
        store = consensus.default_store()
        if store is None or not 1 < self._ranks() <= MOST_RANKS or rank() >= self._ranks():
            return False
        store.set(self._key(step, rank()), json.dumps(facts))
        if rank() == 0:
            self._open.append(step)
        return True

    def complete(self) -> list[tuple[int, list[dict[str, Any]]]]:
        """Return the steps at which all ranks have published by now, with their facts. Only rank 0 has any."""
        store = consensus.default_store()
        found = []
        for step in list(self._open if store is not None else ()):
            keys = [self._key(step, number) for number in range(self._ranks())]
            if store.check(keys):
                self._open.remove(step)
                found.append((step, [json.loads(text) for text in store.multi_get(keys)]))
                for key in keys:
                    store.delete_key(key)
            elif step + 20 * COMPARE_EVERY < self._open[-1]:
                self._open.remove(step)  # a rank has stopped, or counts other steps
        return found


def different_weights(reports: list[dict[str, Any]]) -> list[int]:
    """Return the ranks whose weights differ from those of most ranks; none if weights are sharded or unknown."""
    sums = [report.get("weights") for report in reports]
    if any(each is None for each in sums):
        return []
    counts: dict[str, int] = {}
    for each in sums:
        counts[str(each)] = counts.get(str(each), 0) + 1
    common = max(counts, key=lambda key: counts[key])
    return [number for number, each in enumerate(sums) if str(each) != common]


def median_losses(reports: list[dict[str, Any]]) -> tuple[list[float], list[float]] | None:
    """Return the median loss of each rank and its deviation; None if a rank has none that are finite."""
    pairs = [(report.get("loss"), report.get("spread")) for report in reports]
    finite = [
        (float(loss), float(spread))
        for loss, spread in pairs
        if loss is not None and spread is not None and math.isfinite(loss) and math.isfinite(spread)
    ]
    if len(finite) < len(reports) or not finite:
        return None
    return [loss for loss, _ in finite], [spread for _, spread in finite]
