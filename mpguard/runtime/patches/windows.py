"""Installed libraries against the versions that mpguard was tested with, and which patches apply to them.

From metadata and the files of the libraries: nothing is imported.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpguard.core.patches import ADJUSTMENTS, PATCHES, PROOF, Adjustment, Patch
from mpguard.core.tested import DISTRIBUTIONS, SHOWN, TESTED, Window
from mpguard.runtime.patches.fit import LOST, TABLES, Fit, read


@dataclasses.dataclass(frozen=True)
class InstalledLibrary:
    """A library. place: of its version in the window: `older`, `inside`, `newer`. fits: of its patches."""

    name: str
    version: str
    tested: Window
    place: str
    fits: tuple[Fit, ...]

    @property
    def title(self) -> str:
        """The name and the version, for messages."""
        return f"{SHOWN.get(self.name, self.name)} {self.version}"

    @property
    def lost(self) -> list[Fit]:
        """The patches that do not apply."""
        return [fit for fit in self.fits if fit.state == LOST]

    def line(self) -> str | None:
        """Return the line to print; None for a tested version to which every patch applies."""
        if self.place == "inside" and not self.lost:
            return None
        relation = {"newer": "newer than tested", "older": "older than tested", "inside": "tested"}[self.place]
        line = f"{self.title}: {relation} ({self.tested})"
        if not self.fits:
            return line
        line += f"; patches that apply: {len(self.fits) - len(self.lost)} of {len(self.fits)}"
        lost: dict[str, list[str]] = {}
        for fit in self.lost:
            lost.setdefault(fit.patch.lost, []).append(fit.patch.target)
        texts = [f"{', '.join(targets)} ({effect})" for effect, targets in lost.items()]
        return f"{line}, not: {'; '.join(texts)}" if texts else line

    def refusals(self, policy: Any, strategy: str | None) -> Iterator[str]:
        """Yield a message for each patch that the policy needs and that does not apply."""
        for fit in self.lost:
            required = fit.patch.required
            if required is not None and required(policy, strategy):
                yield (
                    f"{self.title}: {fit.reason}; without that patch {fit.patch.lost}. Install a version that was "
                    f"tested: {self.tested}"
                )

    def as_json(self) -> dict[str, Any]:
        """Return it in the form of `doctor --format json`."""
        return {
            "version": self.version,
            "tested": {"oldest": self.tested.oldest, "newest": self.tested.newest},
            "place": self.place,
            "patches": len(self.fits),
            "not_applied": [
                {"patch": fit.patch.name, "reason": fit.reason, "lost": fit.patch.lost} for fit in self.lost
            ],
        }


def inspect(
    versions: Mapping[str, str], paths: Sequence[str], needed: Callable[[Patch | Adjustment], bool] | None = None
) -> list[InstalledLibrary]:
    """Return the installed libraries of the window. versions: by the name of the distribution. paths: as `sys.path`.

    needed: of the libraries inside their window, read only the files of these patches, and leave out what has none.
    """
    found = []
    for library, window in TESTED.items():
        version = versions.get(DISTRIBUTIONS.get(library, library))
        if version is None:
            continue
        place = window.place(version)
        own = [each for each in _table() if each.package == library]
        if place == "inside" and needed is not None:
            own = [each for each in own if needed(each)]
            if not own:
                continue
        found.append(InstalledLibrary(library, version, window, place, tuple(read(own, paths))))
    return found


def installed_versions() -> dict[str, str]:
    """Return the versions of the libraries of the window in this environment, by the name of the distribution."""
    versions = {}
    for library in TESTED:
        name = DISTRIBUTIONS.get(library, library)
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def needed_by(policy: Any, strategy: str | None) -> Callable[[Patch | Adjustment], bool]:
    """Return a function that is True for the patches without which a run cannot have a policy."""
    return lambda each: each.required is not None and each.required(policy, strategy)


def of_run(policy: Any, strategy: str | None) -> list[InstalledLibrary]:
    """Return the installed libraries outside of their windows, and those of whose patches a policy needs one."""
    return inspect(installed_versions(), sys.path, needed_by(policy, strategy))


def lines(libraries: Iterable[InstalledLibrary]) -> list[str]:
    """Return the lines that a run prints next to its header: one for each library that was not tested, or not so."""
    return [line for each in libraries if (line := each.line()) is not None]


def refusals(libraries: Iterable[InstalledLibrary], policy: Any, strategy: str | None) -> list[str]:
    """Return a message for each patch of the libraries that a policy needs and that does not apply."""
    return [reason for each in libraries for reason in each.refusals(policy, strategy)]


def _table() -> Sequence[Patch | Adjustment]:
    """Return the table of a run; the modules that fill it import no library."""
    importlib.import_module(TABLES[0])
    return [*(each for each in PATCHES if each.part == PROOF), *ADJUSTMENTS]
