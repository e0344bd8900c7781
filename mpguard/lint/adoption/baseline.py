"""Baselines: the findings of the day a project took mpguard up, so that only new ones count.

A known finding is told by its path (from the baseline's folder), its code and its line of source, and by how many
there are of it; lines above it may come and go. The file is sorted, a finding a line: its changes can be reviewed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from mpguard.errors import ConfigError
from mpguard.lint.adoption.fingerprint import source_line
from mpguard.lint.finding import Finding

VERSION = 1
#: Path, code, line of source.
Known = Counter[tuple[str, str, str]]


def read(file: Path) -> Known:
    """The findings that a baseline knows. Raises `ConfigError` for what is none."""
    try:
        document: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{file}: cannot be read: {why}; `--write-baseline {file}` writes one") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{file}: is no JSON, which a baseline is; `--write-baseline FILE` writes one") from None
    version = document.get("mpguard_baseline") if isinstance(document, dict) else None
    if version != VERSION:
        said = "is no baseline" if version is None else f"is a baseline of version {version!r}, {VERSION} is needed"
        raise ConfigError(f"{file}: {said}; `--write-baseline FILE` writes one")
    known: Known = Counter()
    try:
        for each in document["findings"]:
            known[str(each["path"]), str(each["code"]), str(each["line"])] += int(each["count"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{file}: a finding needs `path`, `code`, `line` and `count`; write it again") from None
    return known


def written(findings: Iterable[Finding], file: Path) -> bytes:
    """The baseline of some findings, for `file`."""
    known = Counter(_key(finding, file) for finding in findings)
    entries = [
        json.dumps({"path": path, "code": code, "line": line, "count": count})
        for (path, code, line), count in sorted(known.items())
    ]
    listed = ",".join(f"\n  {entry}" for entry in entries) + ("\n " if entries else "")
    return f'{{"mpguard_baseline": {VERSION},\n "findings": [{listed}]}}\n'.encode()


def unknown(findings: Iterable[Finding], known: Known, file: Path) -> tuple[list[Finding], Known]:
    """The findings that the baseline in `file` does not know, and what it knows beyond them."""
    left = known.copy()
    new = []
    for finding in findings:
        key = _key(finding, file)
        if left[key] > 0:
            left[key] -= 1
        else:
            new.append(finding)
    return new, +left


def gone(left: Known, checked: Collection[str], file: Path) -> int:
    """How many known findings are no longer there, in the files that were checked."""
    paths = {_path(path, file) for path in checked}
    return sum(count for (path, _, _), count in left.items() if path in paths)


def _key(finding: Finding, file: Path) -> tuple[str, str, str]:
    return _path(finding.path, file), finding.code, source_line(finding)


def _path(path: str, file: Path) -> str:
    return Path(os.path.relpath(os.path.realpath(path), os.path.realpath(file.parent))).as_posix()
