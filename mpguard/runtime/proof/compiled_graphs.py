"""`CompiledGraphs`: the matmuls of compiled code, by the name of the range around its calls.

The name has a hash of the code and of its inputs' dtypes and shapes. Where the name of a call is known, so are its
products: in a replay of a CUDA graph, in which no operator runs, and in a recording without shapes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from typing import Any

from mpguard.runtime.proof.products import Work

#: The module that inductor imports to record CUDA graphs.
CUDA_GRAPHS = "torch._inductor.cudagraph_trees"

#: The beginning of the name of the range around a call of code that inductor has compiled; the rest is a hash of the
#: code and of its inputs' dtypes and shapes, or None where inductor has made none.
GRAPH_CALL, NO_HASH = "## Call CompiledFxGraph", "## Call CompiledFxGraph None "


@dataclasses.dataclass(frozen=True)
class GraphCall:
    """A call of compiled code. event: its range. products: those whose operators ran in it, with their FLOPs."""

    event: Any
    products: list[tuple[Work, int]] = dataclasses.field(default_factory=list)


class CompiledGraphs:
    """What recordings with shapes have found in compiled code, and around it."""

    def __init__(self) -> None:
        self._products: dict[str, list[tuple[Work, int]]] = {}
        #: Graphs that multiply nothing.
        self._without: set[str] = set()
        #: Names of what may be a kernel of another library, and has multiplied nothing.
        self.harmless: set[str] = set()
        #: What copies in a backward pass have converted, by their number.
        self.conversions: dict[int, Counter[tuple[str, str]]] = {}

    def __contains__(self, name: str) -> bool:
        """True if a call with matmuls was seen."""
        return name in self._products

    def is_known(self, name: str) -> bool:
        """True if a call was seen."""
        return name in self._products or name in self._without

    def replayed(self, call: GraphCall, *, shapes: bool = True) -> list[tuple[Work, int]]:
        """Return the matmuls of a call whose operators did not run; remember them if all did.

        shapes: False if the operators that ran were recorded without shapes.
        """
        name = call.event.name
        known = self._products.get(name, [])
        if len(call.products) >= len(known):
            if shapes and not name.startswith(NO_HASH):
                if call.products:
                    self._products[name] = call.products
                else:
                    self._without.add(name)
            return []
        if shapes and CUDA_GRAPHS not in sys.modules:
            return []
        ran = Counter(_kind(work) for work, _ in call.products)
        missing = []
        for work, flops in known:
            if ran[_kind(work)]:
                ran[_kind(work)] -= 1
            else:
                missing.append((work, flops))
        return missing


def _kind(work: Work) -> tuple[str | None, bool, str]:
    return work.dtype, work.attention, work.name
