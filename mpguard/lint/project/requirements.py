"""Which versions of a package the project of a file asks for, as pyproject.toml, requirements*.txt and the like say."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from mpguard.core import tracked_fs
from mpguard.core.tracked_fs import cached_per_run

#: Files that name requirements; `requirements/*.txt` too.
_FILES = ("pyproject.toml", "setup.py", "setup.cfg", "environment.yml", "environment.yaml", "Dockerfile")
_LARGEST = 1 << 18
#: Folders above a file that are looked at.
_DEEP = 12
_CUDA = re.compile(r"(?:\bcu(1[1-3])(\d)\b|\bnvidia/cuda:(\d\d)\.(\d+))")


@dataclasses.dataclass(frozen=True)
class Required:
    """The versions that all requirements of a package allow; None where nothing bounds them.

    low: from this one on. below: up to before this one. cuda: of the builds of torch that are asked for (`+cu124`).
    """

    low: tuple[int, ...] | None = None
    below: tuple[int, ...] | None = None
    cuda: tuple[int, int] | None = None

    def since(self, version: tuple[int, ...]) -> bool:
        """Whether nothing older than a version is allowed."""
        return self.low is not None and _release(self.low) >= _release(version)

    def before(self, version: tuple[int, ...]) -> bool:
        """Whether only what is older than a version is allowed."""
        return self.below is not None and _release(self.below) <= _release(version)


def _release(version: tuple[int, ...]) -> tuple[int, ...]:
    """A version as it is compared: 2.4 and 2.4.0 are one (PEP 440)."""
    while version and version[-1] == 0:
        version = version[:-1]
    return version


@cached_per_run
def required(folder: str, top: str, package: str) -> Required:
    """What the nearest files that name a package say about it, from a folder up to the top of its tree."""
    name = re.sub(r"[-_.]", "[-_.]", re.escape(package).replace(r"\-", "-").replace(r"\_", "_"))
    wanted = re.compile(
        rf"(?<![\w./-]){name}(?:[-_](?:torch|cu\d+))?(?:\[[\w, -]*\])?(?:[\"']?\s*=\s*[\"']|\s*[(\"']?)\s*"
        r"((?:[<>=!~^]=?=?\s*v?[\d.*]+(?:\s*,\s*)?)+)",
        re.IGNORECASE,
    )
    here, last = Path(folder), Path(top)
    if tracked_fs.is_file(
        last / "__init__.py"
    ):  # a project without a pyproject.toml: its setup.py lies beside the package
        last = last.parent
    for place in [here, *here.parents][:_DEEP]:
        bounds: list[str] = []
        cuda: set[tuple[int, int]] = set()
        for file in _files(place):
            text = _text(file)
            if file.name == "METADATA":
                text = text.partition("\n\n")[0]  # the README follows
            bounds += wanted.findall(text)
            cuda |= {(int(a or c), int(b or d)) for a, b, c, d in _CUDA.findall(text)}
        if bounds or cuda:
            return _bounds(bounds, next(iter(cuda)) if len(cuda) == 1 else None)
        if place == last:
            break
    return Required()


def _files(folder: Path) -> list[Path]:
    found = [folder / name for name in _FILES if tracked_fs.is_file(folder / name)]
    found += [folder / name for name in tracked_fs.list_names(folder, (".txt",)) if "requirements" in name]
    wheels = tracked_fs.list_names(folder, (".dist-info",))
    if len(wheels) == 1:  # an unpacked wheel; several are an environment
        found.append(folder / wheels[0] / "METADATA")
    return found + [
        folder / "requirements" / name for name in tracked_fs.list_names(folder / "requirements", (".txt",))
    ]


def _text(path: Path) -> str:
    try:
        return (tracked_fs.read_up_to(path, _LARGEST) or b"").decode("utf-8", "replace")
    except OSError:
        return ""


def _bounds(specifiers: list[str], cuda: tuple[int, int] | None) -> Required:
    """The widest range: a version is ruled out only where every requirement rules it out."""
    lows: list[tuple[int, ...] | None] = []
    highs: list[tuple[int, ...] | None] = []
    for specifier in specifiers:
        low = below = None
        for sign, text in re.findall(r"([<>=!~^]=?=?)\s*v?([\d.]*\d)", specifier):
            version = tuple(int(part) for part in text.split(".") if part)
            if sign in (">=", ">", "==", "===", "~=", "^"):
                low = version
            if sign in ("==", "==="):
                below = (*version[:-1], version[-1] + 1)
            elif sign == "~=" and len(version) > 1:
                below = (*version[:-2], version[-2] + 1)
            elif sign == "^" and version[0]:
                below = (version[0] + 1,)
            elif sign in ("<", "<="):
                below = version if sign == "<" else (*version, 1)
        lows.append(low)
        highs.append(below)
    return Required(
        min((low for low in lows if low is not None), default=None) if None not in lows else None,
        max((high for high in highs if high is not None), default=None) if None not in highs else None,
        cuda,
    )
