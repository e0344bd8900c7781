"""Applies fixes: in rounds, since one may make room for another, until none is left.

What a round makes must parse, or it is not kept: the file that a fix would break is left as it is
without that fix, which is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from mpguard.core.text_edits import Edit, EditRefused, apply_edits, compatible
from mpguard.lint.model.result import CONFIG, FileCheck, FixResult
from mpguard.lint.model.rule import Diagnostic, Fix

#: Rules that undo each other's fixes would go on for ever; three rounds are the most seen.
MOST_ROUNDS = 20

Check = Callable[[bytes], FileCheck]
Allowed = Literal["safe", "unsafe"]


def apply_fixes(data: bytes, checked: FileCheck, check: Check, allowed: Allowed) -> tuple[FixResult | None, FileCheck]:
    """Applies all fixes that are allowed, and those that then appear.

    check: what there is to report about a content; `checked` is that of `data`. Returns what became
    of the content (None: nothing), and what is left to report about it.
    """
    mender = _Fixer(data, checked, check, allowed)
    for _ in range(MOST_ROUNDS):
        if not mender.round():
            break
    else:
        mender.problems.append(f"1:1: after {MOST_ROUNDS} rounds of fixes there are still more; run it again")
    if mender.data == data and not mender.problems:
        return None, checked
    return FixResult(data, mender.data, mender.fixes, tuple(mender.problems)), mender.checked


def fix_one(data: bytes, checked: FileCheck, check: Check, diagnostic: Diagnostic) -> FixResult | None:
    """Applies the fix of one diagnostic, safe or not; None where it has none. Arguments as for `mend`."""
    if diagnostic.fix is None or not diagnostic.fix.edits:
        return None
    mender = _Fixer(data, checked, check, "unsafe")
    problem = mender.only(diagnostic.fix)
    return FixResult(data, mender.data, mender.fixes, (problem,) if problem else ())


class _Fixer:
    def __init__(self, data: bytes, checked: FileCheck, check: Check, allowed: Allowed) -> None:
        self.data, self.checked, self.fixes = data, checked, 0
        self.problems: list[str] = []
        self._check, self._allowed = check, allowed
        self._refused: set[tuple[str, Fix]] = set()

    def round(self) -> bool:
        """Applies all fixes that fit together, in the order of the file. False: there was none to apply."""
        chosen: list[tuple[Diagnostic, Fix]] = []
        edits: list[Edit] = []
        for diagnostic in sorted(self.checked.diagnostics, key=lambda each: each.span):
            fix = diagnostic.fix
            if fix is not None and self._may(diagnostic.code, fix) and compatible(edits, fix.edits):
                chosen.append((diagnostic, fix))
                edits += fix.edits
        if not chosen:
            return False
        if self._try(edits, len(chosen)) is None:
            return True
        # Something in it breaks the file: find out what, and go on with one that does not.
        lines = self.checked.lines
        for diagnostic, fix in chosen:
            wrong = self._try(list(fix.edits), 1)
            if wrong is None:
                return True
            line, column = lines.position(diagnostic.span[0])
            self.problems.append(
                f"{line}:{column}: the fix of {diagnostic.code} ({fix.title}) was not applied: {wrong}"
            )
            self._refused.add((diagnostic.code, fix))
        return False

    def only(self, fix: Fix) -> str | None:
        """Applies one fix; or says why it cannot be used."""
        return self._try(list(fix.edits), 1)

    def _may(self, code: str, fix: Fix) -> bool:
        allowed = fix.applicability == "safe" or self._allowed == "unsafe"
        return allowed and bool(fix.edits) and (code, fix) not in self._refused

    def _try(self, edits: list[Edit], fixes: int) -> str | None:
        """Takes the content with the edits in the place of the one before; or says why it cannot be used."""
        before = self.checked
        assert before.encode is not None  # there are diagnostics with fixes: it could be read
        ending = _ending(before.lines.text)
        edits = [Edit(e.start, e.end, _with_ending(e.text, ending)) for e in edits]
        try:
            data = before.edited(edits) if before.edited else before.encode(apply_edits(before.lines.text, edits))
        except EditRefused as error:
            return str(error)
        except UnicodeEncodeError as error:
            return f"the file's encoding ({error.encoding}) cannot hold {error.object[error.start : error.end]!r}"
        if data == self.data:
            return "it changes nothing"
        after = self._check(data)
        if after.encode is None:
            return "the result does not parse"
        if any(each.code == CONFIG for each in after.findings) and not any(e.code == CONFIG for e in before.findings):
            return "the result is no usable config"
        self.data, self.checked, self.fixes = data, after, self.fixes + fixes
        return None


def _ending(text: str) -> str:
    """The line ending that the file mostly has."""
    crlf = text.count("\r\n")
    lf, cr = text.count("\n") - crlf, text.count("\r") - crlf
    return max((lf, "\n"), (crlf, "\r\n"), (cr, "\r"), key=lambda pair: pair[0])[1]


def _with_ending(text: str, ending: str) -> str:
    return text.replace("\r\n", "\n").replace("\n", ending) if "\n" in text else text
