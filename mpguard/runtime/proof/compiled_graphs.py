"""`CompiledGraphs`: the matmuls of compiled code, by the name of the range around its calls.

The name has a hash of the code and of its inputs' dtypes and shapes. Where the name of a call is known, so are its
products: in a replay of a CUDA graph, in which no operator runs, in a recording without shapes, and in a call whose
operators are not recorded again (`profiler.only_range`).
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

#: The end of the name of a range in which no operators are recorded.
NOT_RECORDED = " not recorded"


@dataclasses.dataclass(frozen=True)
class GraphCall:
    """A call of compiled code. event: its range. products: those whose operators ran in it, with their FLOPs.

    converted: elements that its copies have converted, by the dtypes before and after.
    """

    event: Any
    products: list[tuple[Work, int]] = dataclasses.field(default_factory=list)
    converted: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)

    @property
    def name(self) -> str:
        """Return the name of the code."""
        return str(self.event.name).removesuffix(NOT_RECORDED)

    @property
    def is_recorded(self) -> bool:
        """False if its operators were not recorded, because they are known."""
        return not self.event.name.endswith(NOT_RECORDED)


class CompiledGraphs:
    """What recordings with shapes have found in compiled code, and around it."""

    def __init__(self) -> None:
        self._products: dict[str, list[tuple[Work, int]]] = {}
        #: Graphs that multiply nothing.
        self._without: set[str] = set()
        #: What the copies of graphs convert.
        self._converted: dict[str, Counter[tuple[str, str]]] = {}
        #: Graphs that hold a kernel of another library: what its backward pass multiplies follows from its node.
        self.opaque: set[str] = set()
        #: Shapes of the trained matrices, by which such kernels are recognized.
        self._weights: set[tuple[int, ...]] = set()
        #: Names of what may be a kernel of another library, and has multiplied nothing.
        self.harmless: set[str] = set()
        #: What copies in a backward pass have converted outside of graphs, by their number.
        self.conversions: dict[int, Counter[tuple[str, str]]] = {}

    def __contains__(self, name: str) -> bool:
        """True if a call with matmuls was seen."""
        return name in self._products

    def is_known(self, name: str) -> bool:
        """True if a call was seen."""
        return name in self._products or name in self._without

    def needs_no_operators(self, name: str, weights: set[tuple[int, ...]]) -> bool:
        """True if the range of a call shows all that its operators would. weights: shapes of the trained matrices."""
        if not weights <= self._weights:
            self._weights |= weights
            self._products.clear()
            self._without.clear()
        return self.is_known(name) and name not in self.opaque

    def converted_in(self, call: GraphCall) -> Counter[tuple[str, str]]:
        """Return what the copies of a call have converted, if they were recorded now or before."""
        return call.converted or self._converted.get(call.name, call.converted)

    def replayed(self, call: GraphCall, *, shapes: bool = True) -> list[tuple[Work, int]]:
        """Return the matmuls of a call whose operators did not run, or were not recorded; remember them if all were.

        shapes: False if the operators that ran were recorded without shapes.
        """
        name = call.name
        known = self._products.get(name, [])
        if not call.is_recorded:
            return known
        if len(call.products) >= len(known):
            if shapes and not name.startswith(NO_HASH):
                if call.products:
                    self._products[name] = call.products
                else:
                    self._without.add(name)
                if call.converted:
                    self._converted[name] = call.converted
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
