"""Baselines: the findings of a project when it adopted mpguard, so that only new ones are reported.

A known finding is identified by its path (from the baseline's folder), its code, its line of source, and the number
of equal ones; lines above it may change. The file is sorted, with a line per finding, so that changes can be reviewed.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from mpguard.core import tracked_fs
from mpguard.core.errors import ConfigError
from mpguard.lint.model.finding import Finding
from mpguard.lint.model.retired import RETIRED, successor
from mpguard.lint.run.adoption.fingerprint import source_line

VERSION = 1
_KEY = "mpguard_baseline"
_FIELDS = {"path": str, "code": str, "line": str, "count": int}
_WRITES = "`--write-baseline FILE` writes a new one"
#: Path, code, line of source.
Known = Counter[tuple[str, str, str]]


def read(file: Path) -> Known:
    """Return the findings in a baseline. Raises `ConfigError` for a file that is not a baseline."""
    try:
        document: Any = json.loads(_content(file).decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise ConfigError(f"{file}: is not JSON, as a baseline must be; {_WRITES}") from None
    version = document.get(_KEY) if isinstance(document, dict) else None
    if version != VERSION or not isinstance(version, int) or isinstance(version, bool):
        problem = (
            "is not a baseline" if version is None else f"is a baseline of version {version!r}, {VERSION} is needed"
        )
        raise ConfigError(f"{file}: {problem}; {_WRITES}")
    findings = document.get("findings")
    known: Known = Counter()
    for number, each in enumerate(findings if isinstance(findings, list) else [None], 1):
        if not isinstance(each, dict) or not all(_is(each.get(key), kind) for key, kind in _FIELDS.items()):
            where = f"finding {number}" if isinstance(findings, list) else "`findings`"
            raise ConfigError(f"{file}: {where}: `path`, `code`, `line` and a `count` are needed; {_WRITES}")
        known[each["path"], each["code"], each["line"]] += each["count"]
    return known


def without_retired(known: Known) -> tuple[Known, set[str]]:
    """Return known findings under the successors of their codes, and the retired codes among them."""
    current: Known = Counter()
    for (path, code, line), count in known.items():
        if (by := successor(code)) is not None:
            current[path, by, line] += count
    return current, {code for _, code, _ in known if code in RETIRED}


def replaceable(file: Path) -> Known:
    """Return the findings in a file that a new baseline may replace: none if it is damaged. Raises `ConfigError`.

    A baseline with the markers of a merge conflict, or of another version, may be replaced.
    """
    if tracked_fs.type_of(str(file)) is None:
        return Counter()
    content = _content(file)
    if content.strip() and not re.match(rb"(\xef\xbb\xbf)?\s*\{\s*\"" + _KEY.encode() + rb"\"", content):
        raise ConfigError(f"{file}: is not a baseline, and is not overwritten; remove it, or name another file")
    try:
        return read(file)
    except ConfigError:
        return Counter()


def _content(file: Path) -> bytes:
    try:
        return tracked_fs.read_regular_file(file)
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file; `--write-baseline {file}` writes one") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None


def _is(value: object, kind: type) -> bool:
    return isinstance(value, str) if kind is str else type(value) is int and value > 0


def known_from(findings: Iterable[Finding], file: Path) -> Known:
    """Return the contents of a baseline of some findings, if it is written to `file`."""
    return Counter(_key(finding, file) for finding in findings)


def written(known: Known) -> bytes:
    """Return the bytes of a baseline."""
    entries = [
        json.dumps({"path": path, "code": code, "line": line, "count": count})
        for (path, code, line), count in sorted(known.items())
    ]
    listed = ",".join(f"\n  {entry}" for entry in entries) + ("\n " if entries else "")
    return f'{{"{_KEY}": {VERSION},\n "findings": [{listed}]}}\n'.encode()


def unknown(findings: Iterable[Finding], known: Known, file: Path) -> tuple[list[Finding], Known]:
    """Return the findings that the baseline in `file` does not know, and the known ones that were not found."""
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
    """Return the number of known findings that were not found, in files that were checked or no longer exist."""
    paths = {_path(path, file) for path in checked}
    return sum(
        count
        for (path, _, _), count in left.items()
        if path in paths or tracked_fs.type_of(str(file.parent / path)) is None
    )


def _key(finding: Finding, file: Path) -> tuple[str, str, str]:
    return _path(finding.path, file), finding.code, source_line(finding)


def _path(path: str, file: Path) -> str:
    return Path(os.path.relpath(os.path.realpath(path), os.path.realpath(file.parent))).as_posix()
