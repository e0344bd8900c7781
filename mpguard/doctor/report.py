"""The result of a diagnosis, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mpguard.runtime.patches.windows import InstalledLibrary


@dataclasses.dataclass(frozen=True)
class MachineProblem:
    """A cause of failures on this machine, and the command or the setting that removes it."""

    what: str
    fix: str


@dataclasses.dataclass(frozen=True)
class RecipeCell:
    """A recipe with a backend (`-` without FP8) and a strategy: works here, or why not.

    shown: a small matmul has been computed here; otherwise `works` follows from hardware and versions alone.
    """

    recipe: str
    backend: str
    strategy: str
    works: bool
    reason: str
    shown: bool = False


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What was found. machine: plain values, for JSON. libraries: against the versions that were tested."""

    machine: Mapping[str, Any]
    packages: Mapping[str, str]
    problems: tuple[MachineProblem, ...]
    cells: tuple[RecipeCell, ...]
    libraries: Mapping[str, InstalledLibrary] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the report in the form of `--format json`."""
        return {
            "version": 1,
            "machine": dict(self.machine),
            "packages": dict(self.packages),
            "libraries": {name: each.as_json() for name, each in self.libraries.items()},
            "problems": [dataclasses.asdict(each) for each in self.problems],
            "cells": [
                {
                    "recipe": each.recipe,
                    "backend": each.backend,
                    "strategy": each.strategy,
                    "works": each.works,
                    "reason": each.reason,
                }
                for each in self.cells
            ],
        }
