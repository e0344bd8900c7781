"""Baselines: the findings of the day a project took mpguard up, so that only new ones count.

A known finding is told by its path (from the baseline's folder), its code and its line of source, and by how many
there are of it; lines above it may come and go. The file is sorted, a finding a line: its changes can be reviewed.
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
from mpguard.lint.run.adoption.fingerprint import source_line

VERSION = 1
_KEY = "mpguard_baseline"
_FIELDS = {"path": str, "code": str, "line": str, "count": int}
_WRITES = "`--write-baseline FILE` writes it anew"
#: Path, code, line of source.
Known = Counter[tuple[str, str, str]]


def read(file: Path) -> Known:
    """The findings that a baseline knows. Raises `ConfigError` for what is none."""
    try:
        document: Any = json.loads(_content(file).decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise ConfigError(f"{file}: is no JSON, which a baseline is; {_WRITES}") from None
    version = document.get(_KEY) if isinstance(document, dict) else None
    if version != VERSION or not isinstance(version, int) or isinstance(version, bool):
        said = "is no baseline" if version is None else f"is a baseline of version {version!r}, {VERSION} is needed"
        raise ConfigError(f"{file}: {said}; {_WRITES}")
    findings = document.get("findings")
    known: Known = Counter()
    for number, each in enumerate(findings if isinstance(findings, list) else [None], 1):
        if not isinstance(each, dict) or not all(_is(each.get(key), kind) for key, kind in _FIELDS.items()):
            where = f"finding {number}" if isinstance(findings, list) else "`findings`"
            raise ConfigError(f"{file}: {where}: `path`, `code`, `line` and a `count` are needed; {_WRITES}")
        known[each["path"], each["code"], each["line"]] += each["count"]
    return known


def replaceable(file: Path) -> Known:
    """What the file knows that a new baseline may take the place of: nothing where it is damaged. Raises `ConfigError`.

    A baseline with the marks of a merge conflict, or of another version, is one all the same.
    """
    if tracked_fs.type_of(str(file)) is None:
        return Counter()
    content = _content(file)
    if content.strip() and not re.match(rb"(\xef\xbb\xbf)?\s*\{\s*\"" + _KEY.encode() + rb"\"", content):
        raise ConfigError(f"{file}: is no baseline, and is not written over; remove it, or name another file")
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
    """What the baseline of some findings knows, in `file`."""
    return Counter(_key(finding, file) for finding in findings)


def written(known: Known) -> bytes:
    """A baseline's content."""
    entries = [
        json.dumps({"path": path, "code": code, "line": line, "count": count})
        for (path, code, line), count in sorted(known.items())
    ]
    listed = ",".join(f"\n  {entry}" for entry in entries) + ("\n " if entries else "")
    return f'{{"{_KEY}": {VERSION},\n "findings": [{listed}]}}\n'.encode()


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
    """How many known findings are no longer there, in the files that were checked and in those that are gone."""
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
