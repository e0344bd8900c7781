"""What becomes of a linted file: findings, defects of rules, fixes that were applied. Plain data."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mpguard.lint.source.files import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpguard.core.text_edits import Edit
    from mpguard.core.tracked_fs import Trace
    from mpguard.lint.model.finding import Finding, Lines
    from mpguard.lint.model.rule import Diagnostic

#: What the engine itself says: of Python, and of a config, that it cannot read.
SYNTAX, CONFIG = "MPG000", "MPG003"


@dataclasses.dataclass
class FileCheck:
    """One version of one file's content: what the rules said of it, and what it takes to change it.

    findings: the diagnostics with their places, one for each and in the same order.
    encode: a new text as the file's bytes; None where the content could not be read.
    ours: it is Python, or a config that mpguard knows.
    edited: the file's bytes with edits of the text, where the text is not the file's own (a notebook's program).
    """

    lines: Lines
    diagnostics: list[Diagnostic]
    findings: list[Finding]
    defects: list[Defect]
    encode: Callable[[str], bytes] | None = None
    recognized: bool = True
    edited: Callable[[list[Edit]], bytes] | None = None


@dataclasses.dataclass(frozen=True)
class Defect:
    """A rule, or the engine, that failed on a file: a fault of mpguard's, not of the file.

    module: where the rule is from, if it is none of ours.
    """

    path: str
    code: str
    error: str
    traceback: str
    module: str = ""

    def __str__(self) -> str:
        who, whom = (f"{self.code} (of {self.module})", " to its authors") if self.module else (self.code, "")
        return (
            f"{self.path}: defect in {who}: {self.error}. Its findings in this file are missing; please report it{whom}"
        )


@dataclasses.dataclass(frozen=True)
class FixResult:
    """A file with fixes applied. problems: why some of them were not."""

    before: bytes
    after: bytes
    fixes: int
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class FileReport:
    """What became of one file. With fixes asked for, the findings are those that are left.

    unmended: the findings without the fixes, for where they cannot be written.
    ours: whether it is Python, or a config that mpguard knows; others are passed over.
    trace: what the findings rest on; None where they are not to be kept: there was trouble, or nobody keeps any.
    """

    target: Target
    findings: tuple[Finding, ...] = ()
    defects: tuple[Defect, ...] = ()
    fix_result: FixResult | None = None
    recognized: bool = True
    trace: Trace | None = None
    before_fixes: tuple[Finding, ...] = ()
