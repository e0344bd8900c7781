"""Can this code run? It cannot where nothing uses it, where no call takes its branch, or where an error comes first.

unused.py      functions, classes and methods that nothing in the project uses
untaken.py     branches that no call of the project takes
raising.py     code behind a statement that raises whenever it runs
namespaces.py  the options of an argument parser, where all of the parser is in the code
executed.py    what is evaluated for certain before and after a line
modules.py     the modules of a project as Python's own parser sees them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpguard.lint.reachability.raising import Raising
from mpguard.lint.reachability.untaken import UntakenBranches
from mpguard.lint.reachability.unused import UnusedDefinitions

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView


class Reachability:
    """The code of one file that can run."""

    def __init__(self, facts: ProgramView) -> None:
        self._facts = facts
        self._unused, self._branches = facts.part(UnusedDefinitions), facts.part(UntakenBranches)
        self._raising: Raising | None = None

    def is_used(self, place: int) -> bool:
        """True unless an offset is in a definition that nothing in the project uses, or a branch that no call takes."""
        return not self._unused.contain(place) and not self._branches.contain(place)

    def can_run(self, place: int, cells: Sequence[int] = ()) -> bool:
        """True unless an offset is in code that is not used, or that is only reached through an error.

        cells: where the cells of a notebook begin in the code.
        """
        if not self.is_used(place):
            return False
        if self._raising is None:
            self._raising = Raising(self._facts, self._branches, cells)
        return not self._raising.contain(place)
