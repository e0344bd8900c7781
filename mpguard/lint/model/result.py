"""The results for a linted file: findings, defects of rules, fixes that were applied. Plain data."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mpguard.lint.source.files import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpguard.core.text_edits import Edit
    from mpguard.core.tracked_fs import Accesses
    from mpguard.lint.model.finding import Finding, Lines
    from mpguard.lint.model.rule import Diagnostic

#: The codes of the engine itself: Python, and a config, that it cannot read.
SYNTAX, CONFIG = "MPG000", "MPG003"


@dataclasses.dataclass
class FileCheck:
    """The check of one version of a file's content: its diagnostics, and what a fix needs to change it.

    findings: the diagnostics with their places, one for each and in the same order.
    encode: encodes a new text as the file's bytes; None where the content could not be read.
    recognized: it is Python, or a config that mpguard supports.
    edited: the file's bytes with edits of the text, where the text is not the file's own (a notebook's program).
    retired: the retired codes that its suppressions name.
    """

    lines: Lines
    diagnostics: list[Diagnostic]
    findings: list[Finding]
    defects: list[Defect]
    encode: Callable[[str], bytes] | None = None
    recognized: bool = True
    edited: Callable[[list[Edit]], bytes] | None = None
    retired: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Defect:
    """A rule, or the engine, that failed on a file: an error of mpguard, not of the file.

    module: the module of the rule, if another package defines it.
    """

    path: str
    code: str
    error: str
    traceback: str
    module: str = ""

    def __str__(self) -> str:
        rule, recipient = (f"{self.code} (of {self.module})", " to its authors") if self.module else (self.code, "")
        missing = "Its findings in this file are missing; please report it"
        return f"{self.path}: defect in {rule}: {self.error}. {missing}{recipient}"


@dataclasses.dataclass(frozen=True)
class FixResult:
    """A file's content before and after its fixes. problems: why some fixes were not applied."""

    before: bytes
    after: bytes
    fixes: int
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class FileReport:
    """The result for one file. In a run that fixes, the findings are those that are left.

    recognized: it is Python, or a config that mpguard supports; other files are skipped.
    trace: what the findings depend on; None where they must not be cached (there was a defect), or there is no cache.
    before_fixes: the findings before the fixes, for the case that the fixed content cannot be written.
    retired: the retired codes that suppressions in the file name.
    """

    target: Target
    findings: tuple[Finding, ...] = ()
    defects: tuple[Defect, ...] = ()
    fix_result: FixResult | None = None
    recognized: bool = True
    trace: Accesses | None = None
    before_fixes: tuple[Finding, ...] = ()
    retired: tuple[str, ...] = ()
