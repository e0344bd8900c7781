"""Does the program of this code use it? Findings in code that nothing uses, or that no call gets to, are dropped.

unused.py   functions, classes and methods that nothing in the project uses
untaken.py  branches that no call of the project takes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpguard.lint.reachability.untaken import UntakenBranches
from mpguard.lint.reachability.unused import UnusedDefinitions, is_unused_module, is_unused_value

if TYPE_CHECKING:
    from mpguard.lint.facts.program.view import ProgramView

__all__ = ["Reachability", "is_unused_module", "is_unused_value"]


class Reachability:
    """The code of one file that its program uses."""

    def __init__(self, facts: ProgramView) -> None:
        self._unused, self._branches = facts.part(UnusedDefinitions), facts.part(UntakenBranches)

    def is_used(self, place: int) -> bool:
        """True unless an offset is in a definition that nothing in the project uses, or a branch that no call takes."""
        return not self._unused.contain(place) and not self._branches.contain(place)
