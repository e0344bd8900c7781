"""SARIF 2.1.0, for code scanning: findings with their second places and fixes, and the pages of their rules.

Lines and columns start at 1, columns count code points (`columnKind`), and ends are exclusive. Paths below the working
directory are relative to it (`%SRCROOT%`), others are absolute.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mpguard.core.console import printable
from mpguard.core.version import __version__
from mpguard.lint.formats import headline
from mpguard.lint.formats.terminal import Outcome, manual_url
from mpguard.lint.model.finding import Finding, PlacedFix, PlacedNote
from mpguard.lint.model.rule import BaseRule
from mpguard.lint.run.adoption.fingerprint import fingerprints

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_ROOT = "%SRCROOT%"


def report(outcome: Outcome) -> str:
    """Return the findings, and what could not be checked, as SARIF."""
    from mpguard.lint.model.rule import rules

    codes = sorted({finding.code for finding in outcome.findings})
    known = rules() if codes else {}
    index = {code: number for number, code in enumerate(codes)}
    digests = fingerprints(outcome.findings, lambda path: _artifact(path)["uri"])
    run = {
        "tool": {
            "driver": {
                "name": "mpguard",
                "version": __version__,
                "rules": [_rule(known[code]) for code in codes],
            }
        },
        "invocations": [
            {
                "executionSuccessful": not outcome.trouble,
                "toolExecutionNotifications": [
                    {"level": "error", "message": {"text": printable(problem.partition("\n")[0])}}
                    for problem in outcome.trouble
                ],
            }
        ],
        "originalUriBaseIds": {_ROOT: {"uri": _uri(f"{Path.cwd()}/")}},
        "columnKind": "unicodeCodePoints",
        "results": [
            _result(finding, index[finding.code], digest)
            for finding, digest in zip(outcome.findings, digests, strict=True)
        ],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _rule(rule: type[BaseRule]) -> dict[str, Any]:
    from mpguard.lint.model.rule_page import page

    text = page(rule)
    url = manual_url(rule.code)
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": " ".join(rule.page().partition("\n\n")[0].split()) or rule.name},
        "help": {"text": text, "markdown": text},
        **({"helpUri": url} if url else {}),
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"tags": ["mixed-precision"], "precision": "medium" if rule.preview else "very-high"},
    }


def _result(finding: Finding, index: int, digest: str) -> dict[str, Any]:
    message = headline(finding) + (f". {printable(finding.help)}" if finding.help else "")
    placed = [note for note in finding.notes if note.start is not None and finding.cell is None]
    # Places in a notebook are those of a cell, and do not describe what a fix replaces in the file.
    fix = finding.fix if finding.cell is None else None
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": _LEVELS[finding.severity],
        "message": {"text": message},
        "locations": [_location(finding)],
        **({"relatedLocations": [_related(note, finding.path) for note in placed]} if placed else {}),
        "partialFingerprints": {"mpguard/v1": digest},
        **({"fixes": [_fix(fix, finding.path)]} if fix is not None and _encodable(fix) else {}),
    }


def _location(finding: Finding) -> dict[str, Any]:
    region: dict[str, Any] = {"startLine": 1}
    if finding.cell is None:
        region = _region((finding.line, finding.column), (finding.end_line, finding.end_column))
    place: dict[str, Any] = {"physicalLocation": {"artifactLocation": _artifact(finding.path), "region": region}}
    if finding.cell is not None:
        place["logicalLocations"] = [{"name": f"cell {finding.cell}"}]
    return place


def _related(note: PlacedNote, path: str) -> dict[str, Any]:
    assert note.start is not None
    return {
        "message": {"text": printable(note.message)},
        "physicalLocation": {
            "artifactLocation": _artifact(note.path or path),
            "region": _region(note.start, note.end or note.start),
        },
    }


def _fix(fix: PlacedFix, path: str) -> dict[str, Any]:
    unsafe = " (unsafe: may change what the code computes)" if fix.applicability == "unsafe" else ""
    replacements = [
        {"deletedRegion": _region(edit.start, edit.end), "insertedContent": {"text": edit.text}} for edit in fix.edits
    ]
    return {
        "description": {"text": printable(fix.title) + unsafe},
        "artifactChanges": [{"artifactLocation": _artifact(path), "replacements": replacements}],
        "properties": {"applicability": fix.applicability},
    }


def _encodable(fix: PlacedFix) -> bool:
    """True if JSON can represent a fix: bytes that are not UTF-8 are lone surrogates."""
    return bool(fix.edits) and not any("\ud800" <= c <= "\udfff" for edit in fix.edits for c in edit.text)


def _region(start: tuple[int, int], end: tuple[int, int]) -> dict[str, int]:
    return {"startLine": start[0], "startColumn": start[1], "endLine": end[0], "endColumn": end[1]}


def _artifact(path: str) -> dict[str, Any]:
    whole = Path(os.path.normpath(Path(path).absolute()))
    if whole.is_relative_to(Path.cwd()):
        return {"uri": _quoted(whole.relative_to(Path.cwd()).as_posix()), "uriBaseId": _ROOT}
    return {"uri": _uri(str(whole))}


def _uri(path: str) -> str:
    return "file://" + _quoted(path.replace("\\", "/"))


def _quoted(path: str) -> str:
    return quote(os.fsencode(path))
